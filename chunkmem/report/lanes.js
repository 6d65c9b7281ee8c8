// The upper part of a panel: the axis, the bytes on DEVICE, and the lanes with their spans and stalls.

const AXIS_HEIGHT = 34;
const MEMORY_HEIGHT = 46;
const LANE_HEIGHT = 20;
const LANE_GAP = 4;
const LANE_NAMES = { "compute": "compute", "h2d": "copies to DEVICE", "d2h": "copies to HOST", "host-update": "updates on HOST", "collective": "between ranks" };

/** Lanes that either timeline of a run has, so that nothing jumps when they are exchanged. */
function laneNames(run) {
  const order = ["compute", "h2d", "d2h", "host-update", "collective", "disk"];
  const present = new Set(Object.values(run.views).flatMap(view => view.lanes.map(lane => lane.name)));
  return order.filter(name => name === "compute" || present.has(name));
}

function laneTop(index) {
  return AXIS_HEIGHT + MEMORY_HEIGHT + 6 + index * (LANE_HEIGHT + LANE_GAP);
}

function lanesHeight(run) {
  return laneTop(laneNames(run).length) + 4;
}

function drawLanes(canvas, run, view) {
  const context = prepare(canvas);
  if (!context) return;
  const scale = new Scale(view, canvas.clientWidth), timeline = run.views[view.mode];
  drawAxis(context, scale, canvas.clientHeight);
  drawMemory(context, run, timeline, scale, AXIS_HEIGHT, MEMORY_HEIGHT);
  const names = laneNames(run);
  names.forEach((name, index) => {
    const y = laneTop(index);
    context.fillStyle = "#f5f7f9";
    context.fillRect(scale.left, y, scale.right - scale.left, LANE_HEIGHT);
    gutterText(context, LANE_NAMES[name] || name, y + LANE_HEIGHT / 2);
    const lane = timeline.lanes.find(lane => lane.name === name);
    if (lane) drawSpans(context, run, lane, scale, y);
  });
  drawStalls(context, timeline.stalls, scale, laneTop(0));
  drawPhases(context, run, timeline, scale, canvas.clientHeight, AXIS_HEIGHT - 16);
  namePhases(context, run, timeline, scale);
}

function gutterText(context, text, y) {
  context.fillStyle = COLOR.ink;
  context.textAlign = "right";
  context.fillText(cut(context, text, GUTTER - 12), GUTTER - 8, y);
}

function drawAxis(context, scale, height) {
  const { step, at } = ticks(scale.from, scale.to, scale.right - scale.left);
  context.textAlign = "center";
  for (const ns of at) {
    const x = Math.round(scale.x(ns));
    context.fillStyle = COLOR.grid;
    context.fillRect(x, 14, 1, height);
    context.fillStyle = COLOR.soft;
    if (x > scale.left + 12 && x < scale.right - 24) context.fillText(tickText(ns, step), x, 8);
  }
}

/** Highest bytes of each pixel, as a polygon: moments are visited once, points are at most two a pixel. */
function drawMemory(context, run, timeline, scale, top, height) {
  const chunks = timeline.nbytes, peak = Math.max(timeline.peakNbytes, 1);
  const beside = run.isCharged ? run.moments.beside : null;
  const highest = Math.max(peak, run.capNbytes <= 2 * peak ? run.capNbytes : 0) * 1.12;
  const y = nbytes => top + height - Math.min(1, nbytes / highest) * (height - 2);
  if (beside) fillSteps(context, timeline.starts, scale, at => y(chunks[at] + beside[at]), top + height, COLOR.beside);
  fillSteps(context, timeline.starts, scale, at => y(chunks[at] || 0), top + height, "#8fa3b5");
  const hasCap = run.capNbytes <= 2 * peak;
  if (hasCap) {
    context.fillStyle = COLOR.stall;
    context.fillRect(scale.left, Math.round(y(run.capNbytes)), scale.right - scale.left, 1.5);
  }
  gutterText(context, "bytes on DEVICE", top + height / 2 - 7);
  context.fillStyle = COLOR.soft;
  context.fillText(hasCap ? `cap ${showNbytes(run.capNbytes)}` : `up to ${showNbytes(peak)}`, GUTTER - 8, top + height / 2 + 8);
}

function fillSteps(context, starts, scale, yOf, bottom, color) {
  const size = starts.length - 1;
  let at = Math.max(0, firstAbove(starts, scale.from) - 1);
  let column = -1, top = bottom;
  context.fillStyle = color;
  context.beginPath();
  context.moveTo(scale.left, bottom);
  for (; at < size && starts[at] < scale.to; at++) {
    const x = Math.max(scale.left, Math.floor(scale.x(starts[at]))), y = yOf(at);
    if (x === column) {
      top = Math.min(top, y);
      continue;
    }
    if (column >= 0) {
      context.lineTo(column, top);
      context.lineTo(x, top);
    }
    column = x;
    top = y;
  }
  if (column >= 0) {
    const end = Math.min(scale.right, scale.x(starts[at]));
    context.lineTo(column, top);
    context.lineTo(end, top);
    context.lineTo(end, bottom);
  }
  context.fill();
}

function spanColor(run, lane, spans, at) {
  return LANE_COLOR[lane] || COLOR.phases[spans.moment[at] < 0 ? 0 : run.phases.of[spans.moment[at]]];
}

function drawSpans(context, run, lane, scale, y) {
  const spans = lane.spans, row = new Row(context, scale.left, scale.right), wide = [];
  row.begin(y, LANE_HEIGHT);
  for (let at = firstAbove(spans.reach, scale.from); at < spans.size && spans.start[at] < scale.to; at++) {
    const a = scale.x(spans.start[at]), b = scale.x(spans.end[at]), color = spanColor(run, lane.name, spans, at);
    row.add(a, b, color);
    if (b - a > 6) wide.push([Math.max(a, scale.left), Math.min(b, scale.right), color, at]);
  }
  row.flush();
  context.textAlign = "left";
  let named = -Infinity; // chunks that are exchanged together overlap: the first one is named
  for (const [a, b, color, at] of wide) {
    context.fillStyle = "#fff";
    context.fillRect(Math.floor(b) - 1, y, 1, LANE_HEIGHT);
    const text = b - a > 48 && a >= named - 1 ? cut(context, run.labels[spans.label[at]], b - a - 8) : "";
    context.fillStyle = DARK.has(color) ? "#fff" : "#000";
    if (text) {
      context.fillText(text, a + 4, y + LANE_HEIGHT / 2 + 1);
      named = b;
    }
  }
}

/** Stalls are never thinner than two pixels: they are what one looks for. */
function drawStalls(context, stalls, scale, y) {
  const pattern = stripes(context);
  let right = -Infinity;
  for (let at = firstAbove(stalls.reach, scale.from); at < stalls.size && stalls.start[at] < scale.to; at++) {
    const a = Math.max(scale.left, Math.floor(scale.x(stalls.start[at])));
    const b = Math.min(scale.right, Math.max(a + 2, Math.floor(scale.x(stalls.end[at]))));
    if (b <= right) continue;
    context.fillStyle = b - a > 5 ? pattern : COLOR.stall;
    context.fillRect(a, y - 2, b - a, LANE_HEIGHT + 4);
    right = b;
  }
}

/** Names stand right of where phases begin, if they end before the next one does. */
function namePhases(context, run, timeline, scale) {
  const phases = run.phases.list;
  context.textAlign = "left";
  context.fillStyle = COLOR.ink;
  phases.forEach(({ name, start }, i) => {
    const a = Math.max(scale.left, scale.x(timeline.starts[start]));
    const b = Math.min(scale.right, scale.x(i + 1 < phases.length ? timeline.starts[phases[i + 1].start] : timeline.step));
    if (b - a > context.measureText(name).width + 8) context.fillText(name, a + 4, AXIS_HEIGHT - 8);
  });
}

function drawPhases(context, run, timeline, scale, height, top) {
  context.fillStyle = COLOR.ink;
  for (const { start } of run.phases.list.slice(1)) {
    const x = Math.round(scale.x(timeline.starts[start]));
    if (x < scale.left || x > scale.right) continue;
    for (let y = top; y < height; y += 4) context.fillRect(x, y, 1, 2);
  }
}
