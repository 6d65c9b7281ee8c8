// The strip on top: every run as a whole, with the part that is shown below marked.

const STRIP_HEIGHT = 34;

class Overview {
  constructor(canvas, runs, view) {
    this.canvas = canvas;
    this.runs = runs;
    this.view = view;
    this.picture = document.createElement("canvas");
    canvas.style.height = `${runs.length * (STRIP_HEIGHT + 4) + 6}px`;
    let isDown = false;
    const move = event => {
      const scale = new Scale({ from: view.whole[0], to: view.whole[1] }, canvas.clientWidth - 16);
      const middle = scale.ns(event.clientX - canvas.getBoundingClientRect().left), half = (view.to - view.from) / 2;
      view.setRange(middle - half, middle + half);
    };
    canvas.addEventListener("pointerdown", event => {
      isDown = true;
      canvas.setPointerCapture(event.pointerId);
      move(event);
    });
    canvas.addEventListener("pointermove", event => isDown && move(event));
    canvas.addEventListener("pointerup", () => { isDown = false; });
    canvas.addEventListener("pointercancel", () => { isDown = false; });
    canvas.addEventListener("dblclick", () => view.reset());
  }

  /** The runs themselves change only with the width and the mode; each frame only moves the mark. */
  draw() {
    const { canvas, view, picture } = this, key = `${canvas.clientWidth} ${window.devicePixelRatio} ${view.mode}`;
    const context = prepare(canvas);
    if (!context) return;
    const width = canvas.clientWidth - 16;
    if (this.key !== key) {
      this.key = key;
      this.drawRuns(context, width);
      picture.width = canvas.width;
      picture.height = canvas.height;
      picture.getContext("2d").drawImage(canvas, 0, 0);
    } else {
      context.drawImage(picture, 0, 0, canvas.clientWidth, canvas.clientHeight);
    }
    const scale = new Scale({ from: view.whole[0], to: view.whole[1] }, width), height = canvas.clientHeight - 4;
    const a = scale.x(view.from), b = Math.max(a + 2, scale.x(view.to));
    context.fillStyle = "rgb(26 31 38 / 22%)";
    context.fillRect(scale.left, 0, a - scale.left, height);
    context.fillRect(b, 0, scale.right - b, height);
    context.strokeStyle = COLOR.ink;
    context.lineWidth = 1.5;
    context.strokeRect(a + 0.75, 0.75, Math.max(1, b - a - 1.5), height - 1.5);
  }

  drawRuns(context, width) {
    const scale = new Scale({ from: this.view.whole[0], to: this.view.whole[1] }, width);
    this.runs.forEach((run, index) => {
      const top = 2 + index * (STRIP_HEIGHT + 4), timeline = run.views[this.view.mode];
      const highest = Math.max(timeline.peakNbytes, 1);
      run.phases.list.forEach(({ name, start }, i) => {
        const next = run.phases.list[i + 1], a = scale.x(timeline.starts[start]);
        const b = scale.x(next ? timeline.starts[next.start] : timeline.step);
        context.fillStyle = COLOR.phases[["forward", "backward", "optimizer step"].indexOf(name)];
        context.fillRect(a, top + STRIP_HEIGHT - 4, b - a, 4);
      });
      const y = at => top + STRIP_HEIGHT - 5 - ((timeline.nbytes[at] || 0) / highest) * (STRIP_HEIGHT - 7);
      fillSteps(context, timeline.starts, scale, y, top + STRIP_HEIGHT - 5, "#8fa3b5");
      drawStalls(context, timeline.stalls, { ...scale, x: ns => scale.x(ns) }, top + STRIP_HEIGHT - LANE_HEIGHT - 2);
      gutterText(context, this.runs.length > 1 ? run.name : "whole step", top + STRIP_HEIGHT / 2);
    });
  }
}
