// What is shown: which times, which of the two timelines, how tall rows are. Everything that draws listens.

const MIN_RANGE_NS = 50;

class View {
  constructor(first, last) {
    const margin = 0.01 * (last - first) || 1;
    this.whole = [first - (first < 0 ? margin : 0), last + margin];
    [this.from, this.to] = this.whole;
    this.mode = "happened";
    this.rowHeight = null; // null: as fits
    this.listeners = [];
    this.draws = [];
    this.isWaiting = false;
  }

  /** Draw once before the next frame, however often this is called. */
  invalidate() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      const began = performance.now();
      for (const listener of this.listeners) listener();
      this.draws.push(performance.now() - began);
      if (this.draws.length > 1000) this.draws.splice(0, 500);
    });
  }

  setRange(from, to) {
    const [low, high] = this.whole;
    const size = Math.min(high - low, Math.max(MIN_RANGE_NS, to - from));
    // Keep the middle if the size had to change, then stay within the step.
    const start = Math.min(high - size, Math.max(low, (from + to - size) / 2));
    this.from = start;
    this.to = start + size;
    this.invalidate();
  }

  /** Zoom so that the time under the pointer stays there; a factor below 1 shows less time. */
  zoom(factor, at = (this.from + this.to) / 2) {
    const size = this.to - this.from, [low, high] = this.whole;
    const wanted = Math.min(high - low, Math.max(MIN_RANGE_NS, size * factor));
    const from = at - (at - this.from) * wanted / size;
    this.setRange(from, from + wanted);
  }

  pan(ns) {
    this.setRange(this.from + ns, this.to + ns);
  }

  reset() {
    this.setRange(...this.whole);
  }

  setMode(mode) {
    this.mode = mode;
    this.invalidate();
  }
}

/** From times to pixels of a plot, and back. */
class Scale {
  constructor(view, width) {
    this.from = view.from;
    this.to = view.to;
    this.left = GUTTER;
    this.right = width;
    this.perNs = (width - GUTTER) / (view.to - view.from);
  }

  x(ns) {
    return this.left + (ns - this.from) * this.perNs;
  }

  ns(x) {
    return this.from + (x - this.left) / this.perNs;
  }
}
