// One run: its figures, its lanes, its chunks, and what the pointer does over them.

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

class Panel {
  constructor(run, view, main) {
    this.run = run;
    this.view = view;
    this.scroll = 0;
    this.root = element("section", "panel");
    this.head = element("div", "head");
    this.notes = element("div", "notes");
    this.lanes = element("div", "lanes");
    this.chunks = element("div", "chunks");
    this.plot = element("div", "plot");
    this.bar = element("div", "scroll");
    this.spacer = element("div", "");
    this.laneCanvas = element("canvas", "");
    this.chunkCanvas = element("canvas", "");
    this.crosses = [element("div", "cross"), element("div", "cross")];
    this.lanes.style.height = `${lanesHeight(run)}px`;
    this.laneCanvas.setAttribute("aria-label", `${run.name}: what ran when`);
    this.chunkCanvas.setAttribute("aria-label", `${run.name}: where each chunk was`);
    this.bar.append(this.spacer);
    this.lanes.append(this.laneCanvas, this.crosses[0]);
    this.plot.append(this.chunkCanvas, this.crosses[1]);
    this.chunks.append(this.plot, this.bar);
    this.root.append(this.head, this.notes, this.lanes, this.chunks);
    main.append(this.root);
    this.writeNotes();
    this.bar.addEventListener("scroll", () => {
      this.scroll = this.bar.scrollTop;
      view.invalidate();
    });
    for (const canvas of [this.laneCanvas, this.chunkCanvas]) this.listen(canvas);
    this.point(null);
  }

  get timeline() {
    return this.run.views[this.view.mode];
  }

  get rowHeight() {
    return this.view.rowHeight || fittingRowHeight(this.run, this.plot.clientHeight || 1);
  }

  draw() {
    if (this.shown !== this.view.mode) this.writeFigures();
    this.spacer.style.height = `${this.run.chunks.length * this.rowHeight}px`;
    const most = Math.max(0, this.run.chunks.length * this.rowHeight - this.plot.clientHeight);
    this.scroll = Math.min(this.scroll, most);
    drawLanes(this.laneCanvas, this.run, this.view);
    drawChunks(this.chunkCanvas, this.run, this.view, { scroll: this.scroll, rowHeight: this.rowHeight });
  }

  writeFigures() {
    const mode = this.shown = this.view.mode, other = mode === "happened" ? "predicted" : "happened";
    const summary = this.run.summary, one = summary[mode], two = summary[other];
    const figure = (name, of, cap = "") => {
      const box = element("span", "figure", `${name} `), value = element("b", "", of(one));
      box.append(value, element("small", "", ` ${cap}${of(two) === of(one) ? "" : ` (${other} ${of(two)})`}`));
      return box;
    };
    const title = element("h2", "", this.run.name);
    title.title = summary.run;
    const cap = ` of ${showNbytes(summary.cap_nbytes.device)} on DEVICE`;
    this.head.replaceChildren(
      title,
      figure("step", view => showTime(1e9 * view.step_s)),
      figure("stalls", view => view.num_stalls ? `${showTime(1e9 * view.stall_s)} in ${view.num_stalls}` : "none"),
      figure("to DEVICE", view => showNbytes(view.moved_nbytes.h2d)),
      figure("to HOST", view => showNbytes(view.moved_nbytes.d2h)),
      figure("in time", view => `${view.prefetched} of ${view.fetched}`),
      figure("peak", view => showNbytes(view.peak_nbytes.device), cap),
      figure("beside the chunks", () => showNbytes(summary.non_model.probe.nbytes)),
    );
  }

  writeNotes() {
    const plan_misses = this.run.summary.happened.plan_misses;
    if (plan_misses) {
      const what = plan_misses === 1 ? "1 access was" : `${plan_misses} accesses were`;
      const text = `Not all of the plan was followed: ${what} not foreseen. Chunks are drawn where the plan has them, also where they were not.`;
      this.notes.append(element("span", "warning", text));
    }
    this.notes.append(this.run.differences.join(" \u00b7 ") || "Bytes on each link and the peak of each tier are as predicted.");
  }

  // The pointer.

  listen(canvas) {
    let down = null;
    canvas.addEventListener("wheel", event => {
      event.preventDefault();
      if (event.shiftKey) {
        this.scrollRows(event.deltaY || event.deltaX);
        return;
      }
      const lines = event.deltaMode === 1 ? 16 : 1;
      const amount = Math.max(-300, Math.min(300, event.deltaY * lines));
      this.view.zoom(Math.exp(amount * 0.0025), this.scaleOf(canvas).ns(Math.max(GUTTER, event.offsetX)));
      this.point(event, canvas);
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => {
      if (event.button) return;
      down = { x: event.clientX, y: event.clientY, from: this.view.from, to: this.view.to, scroll: this.scroll };
      canvas.setPointerCapture(event.pointerId);
      canvas.style.cursor = "grabbing";
    });
    canvas.addEventListener("pointermove", event => {
      if (!down) {
        this.point(event, canvas);
        return;
      }
      const ns = (event.clientX - down.x) * (down.to - down.from) / (canvas.clientWidth - GUTTER);
      this.view.setRange(down.from - ns, down.to - ns);
      if (canvas === this.chunkCanvas) this.bar.scrollTop = down.scroll - (event.clientY - down.y);
      this.point(null);
    });
    const up = () => {
      down = null;
      canvas.style.cursor = "";
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("dblclick", () => this.view.reset());
  }

  scrollRows(pixels) {
    this.bar.scrollTop += pixels;
  }

  scaleOf(canvas) {
    return new Scale(this.view, canvas.clientWidth);
  }

  /** Say what is under the pointer, and mark its time in both parts. */
  point(event, canvas) {
    const inside = event && event.offsetX >= GUTTER;
    for (const cross of this.crosses) {
      cross.hidden = !inside;
      if (inside) cross.style.left = `${event.offsetX}px`;
    }
    showTip(inside ? this.tipAt(canvas, event.offsetX, event.offsetY) : null, event);
  }

  tipAt(canvas, x, y) {
    const { run, timeline } = this, scale = this.scaleOf(canvas), ns = scale.ns(x), slack = 3 / scale.perNs;
    if (canvas === this.chunkCanvas) {
      const row = Math.floor((y + this.scroll) / this.rowHeight);
      return row < run.chunks.length ? chunkTip(run, timeline, row, ns) : null;
    }
    if (y < laneTop(0) - 2) return y < AXIS_HEIGHT ? null : memoryTip(run, timeline, ns);
    const index = Math.floor((y - laneTop(0) + LANE_GAP / 2) / (LANE_HEIGHT + LANE_GAP)), name = laneNames(run)[index];
    if (name === "compute") {
      const at = spanAt(timeline.stalls, ns, slack);
      if (at >= 0) return stallTip(run, timeline.stalls, at);
    }
    const lane = timeline.lanes.find(lane => lane.name === name), at = lane ? spanAt(lane.spans, ns, slack) : -1;
    return at < 0 ? null : spanTip(run, name, lane.spans, at);
  }

  /** Where a time of a lane is on the screen. */
  laneAt(name, ns) {
    const box = this.laneCanvas.getBoundingClientRect(), index = laneNames(this.run).indexOf(name);
    return { x: box.left + this.scaleOf(this.laneCanvas).x(ns), y: box.top + laneTop(index) + LANE_HEIGHT / 2 };
  }

  /** Where a time of a row is on the screen; rows may be scrolled out of it. */
  rowAt(row, ns) {
    const box = this.chunkCanvas.getBoundingClientRect();
    return { x: box.left + this.scaleOf(this.chunkCanvas).x(ns), y: box.top + (row + 0.5) * this.rowHeight - this.scroll };
  }
}
