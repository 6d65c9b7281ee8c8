// The lower part of a panel: one row a chunk, coloured by where it is, with a bar below while it is in use.

const STATE_COLOR = [null, COLOR.host, COLOR.device, COLOR.both];

/** 0 nowhere, 1 HOST only, 2 DEVICE only, 3 both. */
function presence(state) {
  return (state >= 3 ? 2 : 0) + (state % 3 ? 1 : 0);
}

function fittingRowHeight(run, height) {
  return Math.min(20, Math.max(3, Math.floor(height / run.chunks.length)));
}

function drawChunks(canvas, run, view, { scroll, rowHeight }) {
  const context = prepare(canvas);
  if (!context) return;
  const height = canvas.clientHeight, scale = new Scale(view, canvas.clientWidth), timeline = run.views[view.mode];
  drawGrid(context, scale, height);
  const first = Math.floor(scroll / rowHeight);
  const last = Math.min(run.chunks.length, Math.ceil((scroll + height) / rowHeight));
  const window = [firstAbove(timeline.starts, scale.from) - 1, scale.to];
  const painter = new Row(context, scale.left, scale.right);
  for (let row = first; row < last; row++) {
    const y = row * rowHeight - scroll;
    painter.begin(y, rowHeight >= 5 ? rowHeight - 1 : rowHeight);
    drawStates(painter, run.changes[row], timeline.starts, scale, window);
    if (rowHeight < 4) continue;
    const bar = Math.max(1, Math.round(rowHeight * 0.25));
    painter.begin(y + rowHeight - 1 - bar, bar);
    drawHeld(painter, run.held[row], timeline.starts, scale, window);
  }
  drawGutter(context, run, { first, last, scroll, rowHeight, width: canvas.clientWidth });
  drawPhases(context, run, timeline, scale, Math.min(height, run.chunks.length * rowHeight - scroll), 0);
}

function drawGrid(context, scale, height) {
  context.fillStyle = COLOR.grid;
  for (const ns of ticks(scale.from, scale.to, scale.right - scale.left).at) {
    context.fillRect(Math.round(scale.x(ns)), 0, 1, height);
  }
}

function drawStates(painter, changes, starts, scale, [moment, to]) {
  const size = changes.at.length, end = starts.length - 1;
  for (let i = Math.max(0, firstAbove(changes.at, moment) - 1); i < size; i++) {
    const a = starts[changes.at[i]];
    if (a >= to) break;
    const b = starts[i + 1 < size ? changes.at[i + 1] : end], where = presence(changes.state[i]);
    // A state of no duration at all was never to be seen.
    if (where && b > a && b > scale.from) painter.add(scale.x(a), scale.x(b), STATE_COLOR[where], where);
  }
  painter.flush();
}

function drawHeld(painter, held, starts, scale, [moment, to]) {
  // Of what began before the first moment shown, only the last can still be held.
  for (let i = Math.max(0, firstAbove(held.begin, moment) - 1); i < held.begin.length; i++) {
    const a = starts[held.begin[i]];
    if (a >= to) break;
    const b = starts[held.begin[i] + held.took[i]];
    if (b > scale.from) painter.add(scale.x(a), scale.x(b), COLOR.held);
  }
  painter.flush();
}

function drawGutter(context, run, { first, last, scroll, rowHeight, width }) {
  context.fillStyle = "#fff";
  context.fillRect(0, 0, GUTTER, 1e5);
  for (let row = first; row < last; row++) {
    const y = row * rowHeight - scroll, role = run.chunks[row].role;
    const begins = row === 0 || run.chunks[row - 1].role !== role;
    if (begins && row > 0) {
      context.fillStyle = COLOR.edge;
      context.fillRect(0, Math.round(y) - 1, width, 1);
    }
    if (rowHeight >= 10) gutterText(context, run.chunks[row].name, y + rowHeight / 2);
    else if (begins || row === first) nameRole(context, run, row, Math.max(0, y), role);
  }
}

/** Rows are too flat for names of their own: name the role, at its first row that is seen. */
function nameRole(context, run, row, y, role) {
  let end = row;
  while (end < run.chunks.length && run.chunks[end].role === role) end++;
  const count = run.chunks.filter(chunk => chunk.role === role).length;
  if ((end - row) < 4) return;
  gutterText(context, role, y + 8);
  context.fillStyle = COLOR.soft;
  if ((end - row) > 8) context.fillText(count === 1 ? "1 chunk" : `${count} chunks`, GUTTER - 8, y + 22);
}
