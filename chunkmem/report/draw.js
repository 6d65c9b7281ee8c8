// Tracks, graphs and the time axis on a canvas. Nothing here knows what a slice stands for: that is in the data.

const GUTTER = 138, AXIS = 20;
const INK = "#1a1f26", SOFT = "#5b6673", GRID = "#e9edf1";
const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

/** The first index whose value is greater than `value`, in a sorted array. */
function firstAbove(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

/** From times in ns to pixels, and back. */
class Scale {
  constructor(from, to, width) {
    Object.assign(this, { from, to, left: GUTTER, right: width, perNs: (width - GUTTER) / (to - from) });
  }

  x(ns) {
    return this.left + (ns - this.from) * this.perNs;
  }

  ns(x) {
    return this.from + (x - this.left) / this.perNs;
  }
}

/** Make a canvas as sharp as the screen; return its context in CSS pixels, or null if there is nothing to see. */
function prepare(canvas) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return null;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  Object.assign(context, { font: FONT, textBaseline: "middle" });
  return context;
}

/** A colour with white stripes: it shows without colour, too. */
function hatch(context, color) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const inner = tile.getContext("2d");
  Object.assign(inner, { fillStyle: color, strokeStyle: "rgb(255 255 255 / 75%)", lineWidth: 1.5 });
  inner.fillRect(0, 0, 8, 8);
  for (const shift of [-8, 0, 8]) {
    inner.moveTo(shift, 8);
    inner.lineTo(shift + 8, 0);
  }
  inner.stroke();
  return context.createPattern(tile, "repeat");
}

/** Text as it fits: whole, the part behind its last dot, or cut. All letters count as average ones, which is quick. */
function fitting(context, text, width) {
  const size = Math.floor(width / (context.measureText("blocks.0.attention").width / 18));
  if (text.length <= size) return text;
  const last = text.slice(text.lastIndexOf(".") + 1);
  return last.length <= size ? last : size < 8 ? "" : `${text.slice(0, size - 1)}\u2026`;
}

function write(context, text, x, y, color = INK, align = "left", width = GUTTER * 10) {
  Object.assign(context, { fillStyle: color, textAlign: align });
  context.fillText(text, x, y, width);
}

function writeInGutter(context, text, y, color = INK) {
  write(context, fitting(context, text, GUTTER - 12), GUTTER - 8, y, color, "right");
}

/** Milliseconds at multiples of 1, 2 or 5 times a power of ten, about 90 pixels apart. */
function drawAxis(context, scale, height) {
  const rough = (scale.to - scale.from) / Math.max(1, (scale.right - scale.left) / 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(times => times * power).find(size => size >= rough);
  const places = Math.max(0, 6 - Math.floor(Math.log10(step) + 1e-9));
  writeInGutter(context, "time, ms", 9, SOFT);
  for (let at = Math.ceil(scale.from / step); at * step <= scale.to; at++) {
    const x = Math.round(scale.x(at * step)), text = (at * step / 1e6).toFixed(places);
    context.fillStyle = GRID;
    context.fillRect(x, AXIS - 4, 1, height);
    const half = context.measureText(text).width / 2;
    if (x + half < scale.right) write(context, text, Math.max(x, scale.left + half), 9, SOFT, "center");
  }
}

/**
 * Draw slices from left to right. What ends in a pixel that is painted already is left out: no track takes more
 * rectangles than it has pixels, however many slices there are.
 */
function drawSlices(context, slices, styles, scale, { y, height, hasGaps }) {
  let painted = scale.left;
  const named = [];
  for (let at = firstAbove(slices.reach, scale.from); at < slices.size && slices.start[at] < scale.to; at++) {
    const [color, ink, share, least, pattern] = styles[slices.style[at]];
    if (!color) continue;
    const a = Math.max(painted, Math.floor(scale.x(slices.start[at])));
    const b = Math.min(scale.right, Math.max(a + (a === painted ? 0 : least), Math.floor(scale.x(slices.end[at]))));
    if (b <= a) continue;
    const part = Math.max(1, Math.round(height * share));
    context.fillStyle = pattern && b - a > 5 ? hatch(context, color) : color;
    context.fillRect(a, y + height - part, b - a - (hasGaps && b - a > 4 ? 1 : 0), part);
    if (slices.text[at] && b - a > 14) named.push([slices.text[at], a, b, ink]);
    painted = b;
  }
  for (const [text, a, b, ink] of named) {
    write(context, fitting(context, text, b - a - 6), a + 3, y + height / 2 + 1, ink, "left", b - a - 6);
  }
}

/** Steps of bytes by moment, the highest of each pixel, and levels across them. */
function drawGraph(context, graph, starts, styles, scale, { y, height }) {
  const yOf = nbytes => Math.round(y + height * (1 - nbytes / graph.top));
  for (const [style, nbytes] of graph.areas) {
    context.fillStyle = styles[style][0];
    let column = -1, most = 0;
    for (let at = Math.max(0, firstAbove(starts, scale.from) - 1); at < nbytes.length && starts[at] < scale.to; at++) {
      const a = Math.max(scale.left, Math.floor(scale.x(starts[at]))), b = Math.min(scale.right, Math.floor(scale.x(starts[at + 1])));
      if (b <= a && a === column && nbytes[at] <= most) continue;
      [column, most] = [a, nbytes[at]];
      context.fillRect(a, yOf(most), Math.max(1, b - a), y + height - yOf(most));
    }
  }
  for (const [nbytes, style, text] of graph.levels) {
    Object.assign(context, { strokeStyle: styles[style][0], lineWidth: 1.5 });
    context.setLineDash(styles[style][4] ? [6, 4] : []);
    context.beginPath();
    context.moveTo(scale.left, yOf(nbytes));
    context.lineTo(scale.right, yOf(nbytes));
    context.stroke();
    context.setLineDash([]);
    Object.assign(context, { strokeStyle: "rgb(255 255 255 / 80%)", lineWidth: 3, lineJoin: "round", textAlign: "left" });
    const level = yOf(nbytes) + (yOf(nbytes) - y > height / 2 ? -8 : 9);
    context.strokeText(text, scale.left + 4, level);
    write(context, text, scale.left + 4, level, styles[style][0]);
  }
  writeInGutter(context, graph.name, y + height / 2 - 7);
  writeInGutter(context, graph.note, y + height / 2 + 8, SOFT);
}
