// The data of the page, unpacked: what [Note: Data of the page] in page.py packs.

/** Sums of a column kept as differences. */
function sums(differences) {
  const values = new Float64Array(differences.length);
  let last = 0;
  for (let i = 0; i < values.length; i++) values[i] = last += differences[i];
  return values;
}

/** The first index whose value is greater than `value`, in a sorted array. */
function firstAbove(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

/** Spans sorted by start, as columns. `reach` is the latest end so far, which is sorted even where spans overlap. */
function unpackSpans(raw) {
  const start = sums(raw.start), size = start.length;
  const end = new Float64Array(size), reach = new Float64Array(size);
  let latest = -Infinity;
  for (let i = 0; i < size; i++) {
    end[i] = start[i] + raw.took[i];
    reach[i] = latest = Math.max(latest, end[i]);
  }
  return { start, end, reach, label: raw.label, moment: raw.moment, row: raw.row, nbytes: raw.nbytes, size };
}

function unpackView(raw, peakNbytes) {
  const lanes = raw.lanes.map(([name, spans]) => ({ name, spans: unpackSpans(spans) }));
  const stalls = unpackSpans(raw.stalls);
  const all = [...lanes.map(lane => lane.spans), stalls].filter(spans => spans.size);
  return {
    step: raw.step,
    starts: sums(raw.starts),
    nbytes: raw.nbytes,
    lanes,
    stalls,
    first: Math.min(0, ...all.map(spans => spans.start[0])),
    last: Math.max(raw.step, ...all.map(spans => spans.reach[spans.size - 1])),
    peakNbytes,
  };
}

/** A phase index by moment, and where phases begin. */
function unpackPhases(raw, size) {
  const of = new Uint8Array(size), names = ["forward", "backward", "optimizer step"];
  raw.forEach(([name, start], i) => of.fill(names.indexOf(name), start, i + 1 < raw.length ? raw[i + 1][1] : size));
  return { of, list: raw.map(([name, start]) => ({ name, start })) };
}

function unpackRun(raw) {
  const moments = raw.moments, size = moments.row.length;
  return {
    name: raw.name,
    summary: raw.summary,
    differences: raw.summary.differences,
    labels: raw.labels,
    chunks: raw.chunks.map(([name, role, nbytes]) => ({ name, role, nbytes })),
    // By row; a state is three times the one on DEVICE plus the one on HOST: 0 no slab, 1 no content, 2 the newest.
    changes: raw.changes.map(([at, state]) => ({ at: sums(at), state })),
    held: raw.held.map(([begin, took]) => ({ begin: sums(begin), took })),
    moments: {
      size,
      kind: moments.kind.map(index => moments.kinds[index]),
      row: moments.row,
      label: moments.label,
      beside: moments.beside,
      sampled: moments.sampled,
    },
    phases: unpackPhases(raw.phases, size),
    views: {
      happened: unpackView(raw.views.happened, raw.summary.happened.peak_nbytes.device),
      predicted: unpackView(raw.views.predicted, raw.summary.predicted.peak_nbytes.device),
    },
    capNbytes: raw.summary.non_model.cap_nbytes,
    isCharged: raw.summary.non_model.is_charged,
  };
}

// Values for people.

function showNbytes(nbytes) {
  if (Math.abs(nbytes) < 1024) return `${nbytes} B`;
  let size = nbytes;
  for (const prefix of "KMGTPE") {
    size /= 1024;
    if (Math.abs(size) < 1023.995 || prefix === "E") return `${size.toFixed(2)} ${prefix}iB`;
  }
}

/** A time in ms to the microsecond; or in the unit that suits it. */
function showExact(ns) {
  return `${(ns / 1e6).toFixed(3)} ms`;
}

function showTime(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${(ns / 1e9).toFixed(2)} s`;
  if (size >= 1e6 || size === 0) return `${(ns / 1e6).toFixed(1)} ms`;
  return size >= 1e3 ? `${(ns / 1e3).toFixed(1)} \u00b5s` : `${ns.toFixed(0)} ns`;
}
