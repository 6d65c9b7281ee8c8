// What everything that draws has in common: colours, a canvas at the screen's resolution, merging below a pixel.

const GUTTER = 138;
const COLOR = {
  ink: "#1a1f26", soft: "#5b6673", grid: "#e9edf1", edge: "#9aa3ad",
  device: "#0072B2", both: "#56B4E9", host: "#F1E488", stall: "#D55E00", held: "#111111", beside: "#DDDDDD",
  phases: ["#009E73", "#CC79A7", "#E69F00"],
};
const LANE_COLOR = { h2d: COLOR.device, d2h: COLOR.host };
const DARK = new Set([COLOR.device, COLOR.phases[0], COLOR.stall]);
const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

/** Make a canvas as sharp as the screen; return its context in CSS pixels, or null if there is nothing to see. */
function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return null;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = FONT;
  context.textBaseline = "middle";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  return context;
}

/**
 * Fills rectangles of one row from left to right. What begins in the pixel where the last one ended is merged into
 * it: no row takes more rectangles than it has pixels, however many spans there are.
 */
class Row {
  constructor(context, left, right) {
    this.context = context;
    this.low = left;
    this.high = right;
    this.left = this.right = -Infinity;
  }

  begin(y, height) {
    this.y = y;
    this.height = height;
    this.left = this.right = -Infinity;
    this.color = null;
  }

  /** Add a rectangle from `a` to `b`; where it is merged, the colour of the higher `rank` is kept. */
  add(a, b, color, rank = 0) {
    const left = Math.max(this.low, Math.floor(a));
    const right = Math.min(this.high, Math.max(left + 1, Math.floor(b)));
    if (right <= left) return;
    if (left < this.right) {
      if (color === this.color || right <= this.right) {
        this.right = Math.max(this.right, right);
        if (rank > this.rank && this.right - this.left <= 1) {
          this.color = color;
          this.rank = rank;
        }
        return;
      }
      // Another colour continues right of the pixel they share.
      this.flush();
      this.start(this.right, right, color, rank);
      return;
    }
    this.flush();
    this.start(left, right, color, rank);
  }

  start(left, right, color, rank) {
    this.left = left;
    this.right = right;
    this.color = color;
    this.rank = rank;
  }

  flush() {
    if (this.color === null) return;
    const width = this.right - this.left;
    if (this.context.fillStyle !== this.color) this.context.fillStyle = this.color;
    this.context.fillRect(this.left, this.y, width, this.height);
    this.color = null;
  }
}

/** Red with white stripes: a stall shows without colour, too. */
function stripes(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const inner = tile.getContext("2d");
  inner.fillStyle = COLOR.stall;
  inner.fillRect(0, 0, 8, 8);
  inner.strokeStyle = "rgb(255 255 255 / 75%)";
  inner.lineWidth = 1.5;
  inner.beginPath();
  for (const shift of [-8, 0, 8]) {
    inner.moveTo(shift, 8);
    inner.lineTo(shift + 8, 0);
  }
  inner.stroke();
  return context.createPattern(tile, "repeat");
}

/** Text cut to a width; measuring every label of a step would take too long, so all letters count as average ones. */
function cut(context, text, width) {
  const size = Math.floor(width / (context.measureText("blocks.0.attention").width / 18));
  return text.length <= size ? text : size < 4 ? "" : `${text.slice(0, size - 1)}\u2026`;
}

/** Where ticks go: at multiples of 1, 2 or 5 times a power of ten, about 90 pixels apart. */
function ticks(from, to, width) {
  const rough = (to - from) / Math.max(1, width / 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(times => times * power).find(size => size >= rough);
  const found = [];
  for (let at = Math.ceil(from / step); at * step <= to; at++) found.push(at * step);
  return { step, at: found };
}

function tickText(ns, step) {
  const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "\u00b5s"], [1, "ns"]].find(([size]) => step >= size * 0.099) || [1, "ns"];
  const value = ns / size;
  return `${Number(value.toFixed(step >= size ? 0 : 1)).toLocaleString("en")} ${unit}`;
}
