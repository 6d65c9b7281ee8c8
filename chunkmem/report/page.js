// What is shown, which time of it, and what the pointer does. Everything is drawn again when one of them changes.

const MIN_RANGE_NS = 50, LANE = 20, LANE_GAP = 4, BAR = 16, GRAPHS = [48, 66];

// The data: [Note: Data of the page] in page.py.

/** Sums of a column kept as differences. */
function sums(differences) {
  const values = new Float64Array(differences.length);
  let last = 0;
  for (let i = 0; i < values.length; i++) values[i] = last += differences[i];
  return values;
}

/** Slices sorted by start, as columns. `reach` is the latest end so far, which is sorted even where slices overlap. */
function unpackSlices(raw) {
  const start = sums(raw.start), end = start.map((ns, i) => ns + raw.took[i]);
  let latest = -Infinity;
  const reach = end.map(ns => latest = Math.max(latest, ns));
  return { start, end, reach, style: raw.style, text: raw.text.map(text => data.texts[text]), tip: raw.tip, size: start.length };
}

const unpackTrack = raw => ({ name: raw.name, layers: raw.layers.map(unpackSlices) });
const unpackView = raw => ({
  ...raw, starts: sums(raw.starts), lanes: raw.lanes.map(unpackTrack), chunks: raw.chunks.map(unpackTrack),
});

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs.map(raw => ({
  ...raw, views: { happened: unpackView(raw.views.happened), predicted: unpackView(raw.views.predicted) },
}));
const ranges = runs.flatMap(run => Object.values(run.views).map(shown => shown.range));

// The part of the time axis that is shown.

const view = {
  mode: "happened",
  rowHeight: null, // null: as fits
  draws: [],
  isWaiting: false,

  begin() {
    const first = Math.min(...ranges.map(range => range[0])), last = Math.max(...ranges.map(range => range[1]));
    const margin = 0.01 * (last - first) || 1;
    this.whole = [first - (first < 0 ? margin : 0), last + margin];
    this.reset();
  },

  /** Draw once before the next frame, however often this is called. */
  invalidate() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      const began = performance.now();
      for (const panel of panels) panel.draw();
      this.draws.push(performance.now() - began);
      if (this.draws.length > 1000) this.draws.splice(0, 500);
    });
  },

  setRange(from, to) {
    const [low, high] = this.whole, size = Math.min(high - low, Math.max(MIN_RANGE_NS, to - from));
    // Keep the middle if the size had to change, then stay within the step.
    this.from = Math.min(high - size, Math.max(low, (from + to - size) / 2));
    this.to = this.from + size;
    this.invalidate();
  },

  /** Zoom so that the time under the pointer stays there; a factor below 1 shows less time. */
  zoom(factor, at = (this.from + this.to) / 2) {
    const [low, high] = this.whole, size = this.to - this.from;
    const wanted = Math.min(high - low, Math.max(MIN_RANGE_NS, size * factor));
    const from = at - (at - this.from) * wanted / size;
    this.setRange(from, from + wanted);
  },

  pan(share) {
    const ns = share * (this.to - this.from);
    this.setRange(this.from + ns, this.to + ns);
  },

  reset() {
    this.setRange(...this.whole);
  },
};

function setMode(mode) {
  view.mode = document.body.dataset.view = mode;
  for (const button of document.querySelectorAll("button[data-mode]")) {
    button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
  }
  view.invalidate();
}

// One run.

/** The slice nearest to a time, at most `slack` away; -1 if there is none. Looks at a few around, never at all. */
function sliceAt(slices, ns, slack) {
  let best = -1, nearest = slack;
  for (let at = firstAbove(slices.reach, ns - slack), tries = 0; at < slices.size && tries < 256; at++, tries++) {
    if (slices.start[at] > ns + slack) break;
    const distance = Math.max(0, slices.start[at] - ns, ns - slices.end[at]);
    if (distance < nearest || (distance === 0 && nearest === 0)) {
      best = at;
      nearest = distance;
    }
  }
  return best;
}

const showMs = ns => `${(ns / 1e6).toFixed(3)} ms`;

class Panel {
  constructor(run, root) {
    Object.assign(this, { run, plot: root.querySelector(".plot"), canvas: root.querySelector("canvas"), scroll: 0 });
    Object.assign(this, { cross: root.querySelector(".cross"), bar: root.querySelector(".scroll") });
    // Where graphs, lanes and rows of chunks begin, from top to bottom.
    let y = AXIS;
    this.graphTops = GRAPHS.map(height => (y += height + 8) - height - 8);
    this.laneTops = run.views.happened.lanes.map(() => (y += LANE + LANE_GAP) - LANE - LANE_GAP);
    this.top = y + 4;
    this.plot.style.minHeight = `${this.top + 190}px`;
    this.bar.style.top = `${this.top}px`;
    this.bar.addEventListener("scroll", () => {
      this.scroll = this.bar.scrollTop;
      view.invalidate();
    });
    this.listen();
    this.point(null);
    new ResizeObserver(() => view.invalidate()).observe(this.plot);
  }

  get shown() {
    return this.run.views[view.mode];
  }

  get scale() {
    return new Scale(view.from, view.to, this.canvas.clientWidth - BAR);
  }

  get rowHeight() {
    const fits = Math.floor((this.canvas.clientHeight - this.top) / this.shown.chunks.length);
    return view.rowHeight || Math.min(20, Math.max(3, fits));
  }

  draw() {
    const context = prepare(this.canvas), { shown, scale, top, rowHeight } = this;
    if (!context) return;
    const height = this.canvas.clientHeight, bottom = shown.chunks.length * rowHeight;
    this.bar.firstElementChild.style.height = `${bottom}px`;
    this.scroll = Math.min(this.scroll, Math.max(0, bottom - (height - top)));
    drawAxis(context, scale, height);
    shown.graphs.forEach((graph, at) => {
      drawGraph(context, graph, shown.starts, data.styles, scale, { y: this.graphTops[at], height: GRAPHS[at] });
    });
    shown.lanes.forEach((track, at) => {
      context.fillStyle = "#f5f7f9";
      context.fillRect(scale.left, this.laneTops[at], scale.right - scale.left, LANE);
      writeInGutter(context, track.name, this.laneTops[at] + LANE / 2);
      this.drawTrack(context, track, { y: this.laneTops[at], height: LANE, hasGaps: true });
    });
    context.save();
    context.beginPath();
    context.rect(0, top, scale.right, Math.min(height - top, bottom));
    context.clip();
    this.drawRows(context, scale, height);
    context.restore();
    context.fillStyle = INK;
    for (const moment of this.run.phases.slice(1)) {
      const x = Math.round(scale.x(shown.starts[moment]));
      if (x >= scale.left && x <= scale.right) for (let y = AXIS; y < Math.min(height, top + bottom); y += 4) context.fillRect(x, y, 1, 2);
    }
  }

  drawTrack(context, track, place) {
    for (const slices of track.layers) drawSlices(context, slices, data.styles, this.scale, place);
  }

  /** One row a chunk; where rows are too flat for names of their own, each group has one. */
  drawRows(context, scale, height) {
    const { shown, rowHeight, top, scroll } = this, yOf = row => top + row * rowHeight - scroll;
    const first = Math.floor(scroll / rowHeight), last = Math.ceil((scroll + height - top) / rowHeight);
    shown.chunks.slice(first, last).forEach((track, i) => {
      const y = yOf(first + i);
      this.drawTrack(context, track, { y, height: rowHeight >= 5 ? rowHeight - 1 : rowHeight });
      if (rowHeight >= 10) writeInGutter(context, track.name, y + rowHeight / 2);
    });
    for (const [name, from, stop] of this.run.groups) {
      const y = Math.max(top, yOf(from));
      context.fillStyle = "#9aa3ad";
      if (from) context.fillRect(0, yOf(from) - 1, scale.right, 1);
      if (rowHeight < 10 && yOf(stop) - y >= 14) writeInGutter(context, name, y + 8);
    }
  }

  listen() {
    const { canvas } = this;
    let down = null;
    canvas.addEventListener("wheel", event => {
      event.preventDefault();
      const amount = event.deltaY * (event.deltaMode === 1 ? 16 : 1);
      if (event.shiftKey) this.bar.scrollTop += amount || event.deltaX;
      else view.zoom(Math.exp(Math.max(-300, Math.min(300, amount)) * 0.0025), this.scale.ns(Math.max(GUTTER, event.offsetX)));
      this.point(event);
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => {
      if (event.button) return;
      down = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, scroll: this.scroll };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", event => {
      this.point(down ? null : event);
      if (!down) return;
      const ns = (event.clientX - down.x) * (down.to - down.from) / (this.scale.right - GUTTER);
      view.setRange(down.from - ns, down.to - ns);
      this.bar.scrollTop = down.scroll - (event.clientY - down.y);
    });
    for (const over of ["pointerup", "pointercancel"]) canvas.addEventListener(over, () => { down = null; });
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("dblclick", () => view.reset());
  }

  /** Say what is under the pointer, and mark its time. */
  point(event) {
    const box = document.getElementById("tip"), isInside = event && event.offsetX >= GUTTER;
    const told = isInside ? this.tipAt(this.scale.ns(event.offsetX), event.offsetY) : null;
    this.cross.hidden = !isInside;
    box.hidden = !told;
    if (isInside) this.cross.style.left = `${event.offsetX}px`;
    if (!told) return;
    [box.firstChild.textContent, box.lastChild.textContent] = [told.title, told.lines.filter(line => line).join("\n")];
    const { width, height } = box.getBoundingClientRect(), right = event.clientX + 14, below = event.clientY + 16;
    box.style.left = `${Math.max(4, right + width > innerWidth ? event.clientX - width - 10 : right)}px`;
    box.style.top = `${Math.max(4, below + height > innerHeight ? event.clientY - height - 10 : below)}px`;
  }

  /** Title and lines of what is at a time and a height. */
  tipAt(ns, y) {
    const { shown } = this, moment = Math.min(shown.moments.tip.length, firstAbove(shown.starts, ns)) - 1;
    const words = tip => data.tips[tip].map(text => data.texts[text]), line = data.texts[shown.moments.line[Math.max(0, moment)]];
    if (y >= this.top) {
      const track = shown.chunks[Math.floor((y - this.top + this.scroll) / this.rowHeight)];
      const told = track ? this.tipsOf(track, ns, 0) : [];
      return told.length ? { title: track.name, lines: [...told.flatMap(tip => tip.lines), line] } : null;
    }
    if (y >= this.laneTops[0]) {
      const track = shown.lanes[Math.floor((y - this.laneTops[0]) / (LANE + LANE_GAP))];
      return track ? this.tipsOf(track, ns, 3 / this.scale.perNs).pop() || null : null;
    }
    if (y < AXIS) return null;
    const [title, , rest] = words(shown.moments.tip[Math.max(0, moment)]);
    return { title, lines: [rest, line] };
  }

  tipsOf(track, ns, slack) {
    return track.layers.map(slices => [slices, sliceAt(slices, ns, slack)]).filter(([, at]) => at >= 0).map(([slices, at]) => {
      const [title, lead, rest] = data.tips[slices.tip[at]].map(text => data.texts[text]);
      const start = slices.start[at], end = slices.end[at];
      return { title, lines: [`${lead}${showMs(start)} to ${showMs(end)}, ${showMs(end - start)} long`, rest] };
    });
  }

  /** Where a time of the track of that name is on the screen; rows may be scrolled out of it. */
  at(name, ns) {
    const box = this.canvas.getBoundingClientRect(), lane = this.shown.lanes.findIndex(track => track.name === name);
    const row = this.shown.chunks.findIndex(track => track.name === name);
    const y = lane >= 0 ? this.laneTops[lane] + LANE / 2 : this.top + (row + 0.5) * this.rowHeight - this.scroll;
    return { x: box.left + this.scale.x(ns), y: box.top + y };
  }
}

// The page.

const panels = [];
const changeRows = factor => {
  view.rowHeight = Math.min(40, Math.max(2, Math.round(panels[0].rowHeight * factor)));
  view.invalidate();
};
const scrollRows = rows => panels.forEach(panel => { panel.bar.scrollTop += rows * panel.rowHeight; });
const keys = {
  "+": () => view.zoom(0.6),
  "=": () => view.zoom(0.6),
  "-": () => view.zoom(1 / 0.6),
  "0": () => view.reset(),
  "Home": () => view.reset(),
  "Escape": () => view.reset(),
  "]": () => changeRows(1.5),
  "[": () => changeRows(1 / 1.5),
  "p": () => setMode(view.mode === "happened" ? "predicted" : "happened"),
  "ArrowLeft": event => view.pan(event.shiftKey ? -0.5 : -0.1),
  "ArrowRight": event => view.pan(event.shiftKey ? 0.5 : 0.1),
  "ArrowUp": () => scrollRows(-3),
  "ArrowDown": () => scrollRows(3),
};
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key](event);
});
for (const button of document.querySelectorAll("button")) {
  button.addEventListener("click", () => button.dataset.mode ? setMode(button.dataset.mode) : keys[button.dataset.key]());
}
view.begin();
document.querySelectorAll(".panel").forEach((root, index) => panels.push(new Panel(runs[index], root)));

/** For those who script the page. Times are in ns since the step began. */
window.chunkmem = { view, runs, setMode, at: (run, name, ns) => panels[run].at(name, ns) };
