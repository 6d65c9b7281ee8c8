// Puts the page together.

const runs = JSON.parse(document.getElementById("data").textContent).map(unpackRun);
const timelines = runs.flatMap(run => Object.values(run.views));
const view = new View(Math.min(...timelines.map(t => t.first)), Math.max(...timelines.map(t => t.last)));
const overview = new Overview(document.getElementById("overview"), runs, view);
const panels = runs.map(run => new Panel(run, view, document.querySelector("main")));
document.title = `${runs.map(run => run.name).join(" and ")} \u2013 chunkmem report`;

function setMode(mode) {
  for (const button of document.querySelectorAll("[data-mode]")) {
    button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
  }
  view.setMode(mode);
}

function changeRows(factor) {
  view.rowHeight = Math.min(40, Math.max(2, Math.round(panels[0].rowHeight * factor)));
  view.invalidate();
}

const actions = {
  in: () => view.zoom(0.6),
  out: () => view.zoom(1 / 0.6),
  reset: () => view.reset(),
  taller: () => changeRows(1.5),
  flatter: () => changeRows(1 / 1.5),
};
const keys = {
  "+": actions.in,
  "=": actions.in,
  "-": actions.out,
  "0": actions.reset,
  "Home": actions.reset,
  "Escape": actions.reset,
  "p": () => setMode(view.mode === "happened" ? "predicted" : "happened"),
  "ArrowLeft": event => view.pan((event.shiftKey ? -0.5 : -0.1) * (view.to - view.from)),
  "ArrowRight": event => view.pan((event.shiftKey ? 0.5 : 0.1) * (view.to - view.from)),
  "ArrowUp": () => panels.forEach(panel => panel.scrollRows(-3 * panel.rowHeight)),
  "ArrowDown": () => panels.forEach(panel => panel.scrollRows(3 * panel.rowHeight)),
};

for (const button of document.querySelectorAll("[data-mode]")) {
  button.addEventListener("click", () => setMode(button.dataset.mode));
}
for (const button of document.querySelectorAll("[data-action]")) {
  button.addEventListener("click", () => actions[button.dataset.action]());
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key](event);
});
view.listeners.push(() => overview.draw(), ...panels.map(panel => () => panel.draw()));
const observer = new ResizeObserver(() => view.invalidate());
for (const panel of panels) observer.observe(panel.plot);
observer.observe(overview.canvas);
view.invalidate();

/** For those who script the page. Times are in ns since the step began. */
window.chunkmem = {
  view,
  runs,
  setMode,
  stallAt: (run, index) => {
    const { start, end } = panels[run].timeline.stalls;
    return panels[run].laneAt("compute", (start[index] + end[index]) / 2);
  },
  laneAt: (run, lane, ns) => panels[run].laneAt(lane, ns),
  rowAt: (run, row, ns) => panels[run].rowAt(row, ns),
};
