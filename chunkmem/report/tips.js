// What is under the pointer, in words.

/** The span nearest to a time, at most `slack` away; -1 if there is none. Looks at a few around, never at all. */
function spanAt(spans, ns, slack) {
  let best = -1, nearest = slack;
  for (let at = firstAbove(spans.reach, ns - slack), tries = 0; at < spans.size && tries < 256; at++, tries++) {
    if (spans.start[at] > ns + slack) break;
    const distance = Math.max(0, spans.start[at] - ns, ns - spans.end[at]);
    if (distance < nearest || (distance === 0 && nearest === 0)) {
      best = at;
      nearest = distance;
    }
  }
  return best;
}

function momentAt(timeline, ns) {
  return Math.max(0, Math.min(timeline.starts.length - 2, firstAbove(timeline.starts, ns) - 1));
}

function momentLine(run, moment) {
  if (moment < 0) return "before the first moment";
  const { kind, row, label } = run.moments;
  return `moment ${moment}: ${run.labels[label[moment]]} (${kind[moment]} ${run.chunks[row[moment]].name})`;
}

function times(from, to) {
  return `${showExact(from)} to ${showExact(to)}, ${showExact(to - from)} long`;
}

function spanTip(run, lane, spans, at) {
  const took = spans.end[at] - spans.start[at], nbytes = spans.nbytes[at], row = spans.row[at];
  const lines = [times(spans.start[at], spans.end[at])];
  if (nbytes) {
    const speed = took > 0 ? `, ${(nbytes / took).toFixed(2)} GB/s` : "";
    lines.push(`${showNbytes(nbytes)} (${nbytes.toLocaleString("en")} bytes)${speed}`);
  } else if (row >= 0) {
    lines.push(`${run.chunks[row].name}, ${showNbytes(run.chunks[row].nbytes)}`);
  }
  lines.push(momentLine(run, spans.moment[at]));
  return { title: `${LANE_NAMES[lane] || lane}: ${run.labels[spans.label[at]]}`, lines };
}

function stallTip(run, stalls, at) {
  const lines = [times(stalls.start[at], stalls.end[at])];
  if (stalls.row[at] >= 0) lines.push(`for ${run.chunks[stalls.row[at]].name}`);
  lines.push(momentLine(run, stalls.moment[at]));
  return { title: `stall: ${run.labels[stalls.label[at]]}`, lines };
}

function memoryTip(run, timeline, ns) {
  const at = momentAt(timeline, ns), nbytes = timeline.nbytes[at];
  const lines = [`chunks: ${nbytes === null ? "not written down" : `${showNbytes(nbytes)} (${nbytes.toLocaleString("en")} bytes)`}`];
  lines.push(`cap: ${showNbytes(run.capNbytes)}${run.isCharged ? ", also of what is beside the chunks" : ", of chunks only"}`);
  const sampled = run.moments.sampled[at];
  lines.push(`beside the chunks: up to ${showNbytes(run.moments.beside[at])}${sampled ? `, sampled ${showNbytes(sampled)}` : ""}`);
  lines.push(momentLine(run, at));
  return { title: "bytes on DEVICE", lines };
}

function chunkTip(run, timeline, row, ns) {
  const chunk = run.chunks[row], changes = run.changes[row], held = run.held[row], moment = momentAt(timeline, ns);
  const i = Math.max(0, firstAbove(changes.at, moment) - 1);
  const until = i + 1 < changes.at.length ? changes.at[i + 1] : timeline.starts.length - 1;
  const state = changes.state[i], names = [];
  const contents = ["", " (a slab, no content)", ""];
  if (state >= 3) names.push(`DEVICE${contents[Math.floor(state / 3)]}`);
  if (state % 3) names.push(`HOST${contents[state % 3]}`);
  const lines = [
    `${names.join(" and ") || "nowhere"}: ${times(timeline.starts[changes.at[i]], timeline.starts[until])}`,
    `${showNbytes(chunk.nbytes)} (${chunk.nbytes.toLocaleString("en")} bytes)`,
  ];
  const use = firstAbove(held.begin, moment) - 1;
  if (use >= 0 && moment < held.begin[use] + held.took[use]) {
    const from = held.begin[use], end = from + held.took[use];
    lines.push(`in use: ${times(timeline.starts[from], timeline.starts[end])}`);
  }
  lines.push(momentLine(run, moment));
  return { title: chunk.name, lines };
}

/** Show words beside the pointer; no words hide them. */
function showTip(tip, event) {
  const box = document.getElementById("tip");
  box.hidden = !tip;
  if (!tip) return;
  const title = document.createElement("b");
  title.textContent = tip.title;
  box.replaceChildren(title, tip.lines.join("\n"));
  const { width, height } = box.getBoundingClientRect();
  const right = event.clientX + 14, below = event.clientY + 16;
  box.style.left = `${Math.max(4, right + width > innerWidth ? event.clientX - width - 10 : right)}px`;
  box.style.top = `${Math.max(4, below + height > innerHeight ? event.clientY - height - 10 : below)}px`;
}
