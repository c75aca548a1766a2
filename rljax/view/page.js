"use strict";
// Draws the page of a token dump. All text of the dump goes into the page as text nodes, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const textOf = new Map(data.texts.map((text, i) => [data.ids[i], text]));
const hasTexts = data.texts.length > 0;
const ARRAYS = { f4: Float32Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array };
const NONE = 2 ** 32 - 1;
const $ = (id) => document.getElementById(id);

let dump; // the entry of data.dumps that is shown
let view; // the tokens of this dump: arrays with one entry for each token of the shown sequences
let filters = {};
let sequence = -1;
let pinned = -1; // the token whose card stays open
let spans = new Map(); // the element of each token of the shown sequence

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function rowOf(cells, tag = "td") {
  const row = make("tr");
  row.append(...cells.map((cell) => (cell instanceof Node ? cell : make(tag, cell))));
  return row;
}

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function short(value, digits = 4) {
  if (value === null || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return String(value);
  const rounded = +value.toPrecision(digits);
  return Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6 ? rounded.toExponential() : String(rounded);
}

async function unpack({ dtype, bytes }) {
  const packed = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new ARRAYS[dtype](await new Response(stream).arrayBuffer());
}

// Unpacks all arrays of a nested object, side by side.
async function unpackAll(node) {
  if (node === null || typeof node !== "object") return node;
  if (node.dtype) return unpack(node);
  const names = Object.keys(node);
  const values = await Promise.all(names.map((name) => unpackAll(node[name])));
  return Object.fromEntries(names.map((name, i) => [name, values[i]]));
}

async function load(index) {
  const tokens = await unpackAll(data.dumps[index].tokens);
  if (index !== Number($("dumps").value)) return; // another dump was chosen meanwhile
  dump = data.dumps[index];
  view = tokens;
  const count = view.ids.length;
  Object.assign(view, { starts: [0], value: new Float64Array(count), position: new Uint32Array(count), kept: new Uint8Array(count) });
  for (const length of dump.lengths) view.starts.push(view.starts.at(-1) + length);
  dump.lengths.forEach((_, s) => {
    for (let i = view.starts[s], place = 0; i < view.starts[s + 1]; i++) {
      if (view.mask[i]) view.position[i] = ++place;
      const sides = [view.trainer[i], view.rollout[i]];
      const isKnown = view.mask[i] && sides.every((value) => Math.abs(value) <= data.largest);
      view.value[i] = isKnown ? sides[0] - sides[1] : NaN;
    }
  });
  document.title = dump.name + " – rljax view";
  showAbout();
  showChoices();
  $("filters").reset();
  readFilters();
  sortSequences();
  showSequence(0);
  document.body.dataset.ready = dump.name;
}

function showAbout() {
  const { trainer, rollout } = dump.columns;
  const side = (place, column) => `${place}: ${column.name}${column.about ? ` (${column.about})` : ""}`;
  const lines = [side("Trainer", trainer), side("Rollout", rollout)];
  if (dump.sampling !== "{}") lines.push(`Sampling: ${dump.sampling}`);
  $("about").replaceChildren(...[...lines, ...dump.facts].map((line) => make("p", line)));
  $("metrics").replaceChildren(...dump.metrics.map(([name, value]) => {
    const item = make("div");
    item.append(make("dt", name), make("dd", short(value)));
    return item;
  }));
}

function distinct(name) {
  const found = new Set();
  const array = view.values[name];
  if (array) array.forEach((value, i) => view.mask[i] && Number.isFinite(value) && found.size < 500 && found.add(value));
  return [...found].sort((a, b) => a - b);
}

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => Object.assign(make("option", text), { value })));
}

function showChoices() {
  const versions = distinct("version");
  $("of-version").hidden = versions.length < 2;
  options($("version"), [["", "any"], ...versions.map((value) => [value, value])]);
  for (const name of ["turn", "after"]) $(`of-${name}`).hidden = !view.values.after;
  $("of-advantage").hidden = !view.values.advantage;
  $("of-entropy").hidden = !view.values.entropy;
  options($("sort"), [["share", "contribution"], ["sum", "sum of log-ratios"], ["mean", "mean size of log-ratios"],
    ["largest", "largest size"], ["tokens", "length"], ["kept", "selected tokens"]]);
}

// Filters

const number = (id) => ($(id).value === "" ? null : Number($(id).value));

function readFilters() {
  filters = { size: [number("size-low"), null] };
  for (const name of ["position", "value", "entropy", "turn", "after"]) filters[name] = [number(`${name}-low`), number(`${name}-high`)];
  for (const name of ["version", "advantage"]) filters[name] = number(name);
  applyFilters();
}

function inside(value, [low, high]) {
  if (low === null && high === null) return true;
  return (low === null || value >= low) && (high === null || value < high); // false for NaN
}

function keeps(i) {
  const { version, advantage } = view.values;
  const value = view.value[i];
  if (!view.mask[i] || Number.isNaN(value)) return false;
  return inside(view.position[i], filters.position) && inside(value, filters.value) && inside(Math.abs(value), filters.size) &&
    ["entropy", "turn", "after"].every((name) => !view.values[name] || inside(view.values[name][i], filters[name])) &&
    (filters.version === null || version[i] === filters.version) &&
    (filters.advantage === null || Math.sign(advantage[i]) === filters.advantage);
}

function applyFilters() {
  const counts = new Array(dump.lengths.length).fill(0);
  const worst = [];
  let all = 0;
  dump.lengths.forEach((_, s) => {
    for (let i = view.starts[s]; i < view.starts[s + 1]; i++) {
      all += view.mask[i];
      view.kept[i] = keeps(i);
      if (!view.kept[i]) continue;
      counts[s]++;
      worst.push(i);
    }
  });
  view.counts = counts;
  worst.sort((a, b) => Math.abs(view.value[b]) - Math.abs(view.value[a]));
  $("kept").textContent = `${worst.length.toLocaleString("en")} of ${all.toLocaleString("en")} response tokens selected`;
  showWorst(worst.slice(0, 50));
  showCharts();
  showCounts();
  fade();
}

function fade() {
  const all = filtersAreOff();
  for (const [i, span] of spans) span.classList.toggle("off", !all && Boolean(view.mask[i]) && !view.kept[i]);
}

// Charts: a light bar for all tokens of the dump, a strong one for the selected tokens that are on the page.

function chartTexts() {
  const size = "mean size of the log-ratio, nats";
  return {
    value: ["Log-ratio, trainer − rollout (nats)", "tokens, logarithmic"],
    position: ["Growth along the position in the response", size],
    ...(view.values.after && {
      turn: ["By turn", size],
      after: ["By distance from the environment's last token", size],
    }),
    ...(view.values.entropy && { entropy: ["Entropy (nats)", "tokens, logarithmic"] }),
  };
}

function bucketOf(edges, value) {
  let low = 0;
  for (let high = edges.length; low < high;) {
    const middle = (low + high) >> 1;
    if (edges[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

function heights(name) {
  const { edges: { [name]: edges }, counts: { [name]: counts }, growth } = dump;
  const of = name === "value" ? view.value : name === "position" ? view.position : view.values[name];
  const [here, number, size] = [0, 0, 0].map(() => new Array(counts.length).fill(0)); // tokens on the page, selected tokens, sums of their sizes
  of.forEach((value, i) => {
    if (Number.isNaN(value) || Number.isNaN(view.value[i])) return;
    const place = bucketOf(edges, value);
    here[place]++;
    if (!view.kept[i]) return;
    number[place]++;
    size[place] += Math.abs(view.value[i]);
  });
  const mean = (sums, over) => sums.map((sum, i) => (over[i] ? sum / over[i] : 0));
  const log = (numbers) => numbers.map((n) => Math.log10(1 + n));
  const [all, some] = growth[name] ? [mean(growth[name], counts), mean(size, here)] : [log(counts), log(number)];
  return { edges, counts, number, all, some };
}

function showCharts() {
  $("charts").replaceChildren(...Object.entries(chartTexts()).map(([name, [title, unit]]) => {
    const box = make("section");
    box.dataset.chart = name;
    box.append(make("h3", title), drawChart(name), make("p", `${unit}. Drag to select, click to clear.`));
    return box;
  }));
}

function drawChart(name) {
  const { edges, all, some, counts, number } = heights(name);
  const first = Math.max(counts.findIndex((n) => n), 0);
  const last = Math.max(counts.findLastIndex((n) => n), first);
  const bars = last - first + 1;
  const width = 320, height = 124, left = 36, base = 108, wide = (width - left) / bars;
  const top = Math.max(...all, ...some, 1e-12);
  const x = (i) => left + (i - first) * wide;
  const y = (value) => base - (value / top) * (base - 8);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const ends = (i) => [i > 0 ? edges[i - 1] : null, i < edges.length ? edges[i] : null];
  for (let i = first; i <= last; i++) {
    const [low, high] = ends(i);
    const range = `${low === null ? "below" : `${short(low)} to`} ${high === null ? "more" : short(high)}`;
    const told = dump.growth[name] ? `; mean size ${short(all[i])}, of which the selected make ${short(some[i])} on this page` : "";
    const bar = svg("g", {});
    bar.append(svg("title", {}, `${range}: ${counts[i]} tokens, ${number[i]} selected on this page${told}`),
      svg("rect", { x: x(i), y: 0, width: wide, height: base, fill: "transparent" }),
      svg("rect", { class: "all", x: x(i) + 0.5, y: y(all[i]), width: Math.max(wide - 1, 0.5), height: base - y(all[i]) }),
      svg("rect", { class: "some", x: x(i) + wide * 0.2, y: y(some[i]), width: wide * 0.6, height: base - y(some[i]) }));
    picture.append(bar);
    const step = Math.ceil(bars / 9);
    if (low !== null && i > first && (i - first) % step === 0) picture.append(svg("text", { x: x(i), y: base + 12, "text-anchor": "middle" }, short(low, 2)));
  }
  const label = dump.growth[name] ? short(top, 2) : Math.round(10 ** top - 1).toLocaleString("en", { notation: "compact" });
  picture.append(svg("text", { x: left - 3, y: 14, "text-anchor": "end" }, label), svg("text", { x: left - 3, y: base, "text-anchor": "end" }, "0"),
    svg("line", { x1: left, x2: width, y1: base, y2: base, stroke: "var(--line)" }));
  const places = (event) => {
    const bounds = picture.getBoundingClientRect();
    const bar = Math.floor((((event.clientX - bounds.left) / bounds.width) * width - left) / wide);
    return Math.min(Math.max(bar, 0), bars - 1) + first;
  };
  const inView = (i) => Math.min(Math.max(i, first), last + 1);
  addBrush(picture, name, filters[name], places, {
    box: (from, to) => ({ x: x(from), y: 2, width: Math.max(x(to) - x(from), 1), height: base - 2 }),
    ends: (from, to) => [ends(from)[0], ends(to)[1]],
    now: [filters[name][0] === null ? first : inView(bucketOf(edges, filters[name][0])), filters[name][1] === null ? last + 1 : inView(bucketOf(edges, filters[name][1]))],
  });
  return picture;
}

// Lets a pointer select bars: a drag fills the two fields of the filter, a click on a selection empties them.
function addBrush(picture, name, [low, high], at, { box, ends, now }) {
  const brush = svg("rect", { class: "brush", visibility: low === null && high === null ? "hidden" : "visible", ...box(...now) });
  picture.append(brush);
  let begin = null;
  const range = (event) => [Math.min(begin, at(event)), Math.max(begin, at(event))];
  picture.addEventListener("pointerdown", (event) => { begin = at(event); picture.setPointerCapture(event.pointerId); });
  picture.addEventListener("pointercancel", () => { begin = null; });
  picture.addEventListener("pointermove", (event) => {
    if (begin === null) return;
    const [from, to] = range(event);
    for (const [key, value] of Object.entries({ ...box(from, to + 1), visibility: "visible" })) brush.setAttribute(key, value);
  });
  picture.addEventListener("pointerup", (event) => {
    if (begin === null) return;
    const [from, to] = range(event);
    const clears = from === to && (low !== null || high !== null);
    [$(`${name}-low`).value, $(`${name}-high`).value] = clears ? ["", ""] : ends(from, to).map((value) => value ?? "");
    readFilters();
  });
}

// Sequences

const COLUMNS = [["share", "share"], ["sum", "sum"], ["mean", "mean"], ["largest", "max"], ["tokens", "tokens"], ["kept", "selected"]];

function sortSequences() {
  const key = $("sort").value;
  const values = dump.names.map((_, s) => (key === "kept" ? view.counts[s] ?? -1 : Math.abs(dump.sequences[key][s])));
  const order = dump.names.map((_, s) => s).sort((a, b) => values[b] - values[a] || a - b);
  $("sequences").tHead.replaceChildren(rowOf(["sequence", ...COLUMNS.map(([, text]) => text)], "th"));
  $("sequences").tBodies[0].replaceChildren(...order.map((s) => {
    const { share, ...rest } = dump.sequences;
    const numbers = COLUMNS.slice(1, -1).map(([name]) => short(rest[name][s], 3));
    const row = rowOf([dump.names[s], `${(100 * share[s]).toFixed(1)}%`, ...numbers, make("td", undefined, "kept")]);
    row.dataset.sequence = s;
    row.title = dump.names[s];
    if (s < dump.lengths.length) return row;
    row.className = "absent";
    row.title += ": its tokens are not on this page; rljax view --max-tokens shows more.";
    return row;
  }));
  showCounts();
}

function showCounts() {
  const all = filtersAreOff();
  for (const row of $("sequences").tBodies[0].rows) {
    const s = Number(row.dataset.sequence);
    const count = view.counts[s];
    row.querySelector(".kept").textContent = count ?? "–";
    row.hidden = !all && !count;
    row.classList.toggle("chosen", s === sequence);
  }
}

const filtersAreOff = () => Object.values(filters).flat().every((value) => value === null);

function level(value) {
  const size = Math.abs(value);
  let found = 0;
  while (found < 5 && size >= steps()[found]) found++;
  return found && (value < 0 ? "n" : "p") + found;
}

const SCALE = Array.from({ length: 19 }, (_, i) => (i % 2 ? 3 : 1) * 10 ** Math.floor((i - 14) / 2)).map((step) => +step.toPrecision(1));
let fifth = 0; // the place in SCALE of the fifth step

const steps = () => SCALE.slice(fifth - 4, fifth + 1);

function showLegend() {
  const chosen = $("scale").value;
  const metrics = Object.fromEntries(dump.metrics);
  const typical = metrics.logprob_abs_diff_p99;
  fifth = chosen === "" ? SCALE.findIndex((step, i) => i >= 4 && (step >= typical || i === SCALE.length - 1)) : Number(chosen);
  const marks = steps();
  $("steps").replaceChildren(make("span", "trainer less likely"), ...marks.map((step, k) => make("i", `≤ −${step}`, `n${k + 1}`)).reverse(),
    make("i", `within ±${marks[0]}`), ...marks.map((step, k) => make("i", `≥ ${step}`, `p${k + 1}`)),
    make("span", "trainer more likely"), make("span", "(nats)"));
}

const tokenText = (id) => (hasTexts ? textOf.get(id) || `[${id}]` : String(id));
const plain = (id) => tokenText(id).replaceAll("\n", "↵");

function showSequence(s) {
  sequence = s;
  unpin();
  spans = new Map();
  showLegend();
  $("name").textContent = `${dump.names[s] ?? ""}`;
  const pieces = document.createDocumentFragment();
  for (let i = view.starts[s]; i < view.starts[s + 1]; i++) {
    const span = make("span", plain(view.ids[i]));
    const breaks = tokenText(view.ids[i]).split("\n").length - 1;
    span.dataset.token = i;
    if (!view.mask[i]) span.className = isOfEnvironment(i) ? "environment" : "prompt";
    else if (Number.isNaN(view.value[i])) span.className = "lost";
    else span.className = level(view.value[i]) || "";
    spans.set(i, span);
    pieces.append(span);
    if (breaks) pieces.append("\n".repeat(breaks));
  }
  $("tokens").className = hasTexts ? "" : "ids";
  $("tokens").replaceChildren(pieces);
  $("tokens").scrollTop = 0;
  fade();
  showCounts();
}

const isOfEnvironment = (i) => !view.mask[i] && view.values.turn?.[i] === 0;

const sequenceOf = (i) => bucketOf(view.starts, i) - 1;

function showWorst(tokens) {
  const sides = ["trainer", "rollout"];
  const names = ["sequence", "position", "token", "log-ratio", ...sides];
  $("worst").tHead.replaceChildren(rowOf(names, "th"));
  $("worst").tBodies[0].replaceChildren(...tokens.map((i) => {
    const numbers = [short(view.value[i]), ...sides.map((side) => short(view[side][i], 6))];
    const row = rowOf([dump.names[sequenceOf(i)], view.position[i], plain(view.ids[i]), ...numbers]);
    row.dataset.token = i;
    return row;
  }));
}

// The card of a token

function cardOf(i) {
  const card = document.createDocumentFragment();
  const table = make("table");
  const line = (name, value) => table.append(rowOf([name, value]));
  card.append(make("b", plain(view.ids[i])));
  line("token id", view.ids[i]);
  const notSampled = isOfEnvironment(i) ? "written by the environment" : "not sampled by the policy";
  line("position", view.mask[i] ? `${view.position[i]} in the response` : notSampled);
  const logprob = (value) => (Number.isNaN(value) ? "none" : `${short(value, 7)} (p ${short(Math.exp(value), 3)})`);
  line("trainer log-probability", logprob(view.trainer[i]));
  line("rollout log-probability", logprob(view.rollout[i]));
  if (!Number.isNaN(view.value[i])) {
    line("log-ratio", `${short(view.value[i], 5)} (ratio ${short(Math.exp(view.value[i]), 4)})`);
  }
  const { entropy, after, ...others } = view.values;
  if (isOfEnvironment(i)) delete others.turn;
  for (const [side, tops] of Object.entries(view.tops)) {
    if (tops.rank[i]) line(`rank for the ${side}`, tops.rank[i] > tops.of ? `beyond ${tops.of}` : tops.rank[i]);
  }
  if (entropy && Number.isFinite(entropy[i])) line("entropy", short(entropy[i]));
  if (after && Number.isFinite(after[i])) line("after the environment", `${after[i]} tokens`);
  for (const name of Object.keys(others).sort()) if (Number.isFinite(others[name][i])) line(name, short(others[name][i]));
  card.append(table);
  for (const [side, { k, ids, logprobs }] of Object.entries(view.tops)) {
    const likely = make("table");
    for (let j = i * k; j < (i + 1) * k; j++) {
      if (ids[j] === NONE) continue;
      const row = rowOf([plain(ids[j]), short(logprobs[j], 5), `p ${short(Math.exp(logprobs[j]), 3)}`]);
      if (ids[j] === view.ids[i]) row.className = "itself";
      likely.append(row);
    }
    if (likely.rows.length) card.append(make("p", `likeliest for the ${side}`), likely);
  }
  return card;
}

function showCard(i) {
  const card = $("card");
  const box = spans.get(i).getClientRects()[0];
  card.replaceChildren(cardOf(i));
  card.hidden = false;
  const { width, height } = card.getBoundingClientRect();
  const below = box.bottom + 6 + height <= innerHeight;
  card.style.left = `${Math.max(4, Math.min(box.left, innerWidth - width - 4))}px`;
  card.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - height - 6)}px`;
}

function pin(i) {
  unpin();
  pinned = i;
  spans.get(i).classList.add("at");
  spans.get(i).scrollIntoView({ block: "nearest" });
  showCard(i);
}

function unpin() {
  if (spans.has(pinned)) spans.get(pinned).classList.remove("at");
  pinned = -1;
  $("card").hidden = true;
}

// Events

function listen() {
  const tokens = $("tokens");
  const tokenAt = (event) => (event.target.dataset.token === undefined ? null : Number(event.target.dataset.token));
  tokens.addEventListener("pointerover", (event) => {
    if (pinned < 0 && event.pointerType === "mouse" && tokenAt(event) !== null) showCard(tokenAt(event));
  });
  tokens.addEventListener("pointerleave", () => { if (pinned < 0) $("card").hidden = true; });
  addEventListener("scroll", () => { if (pinned < 0) $("card").hidden = true; else showCard(pinned); }, true);
  document.addEventListener("click", (event) => {
    if (event.target.closest("#card, #worst")) return;
    const i = tokens.contains(event.target) ? tokenAt(event) : null;
    if (i === null || i === pinned) unpin(); else pin(i);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") unpin();
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || document.activeElement !== tokens) return;
    event.preventDefault();
    const next = pinned < 0 ? view.starts[sequence] : pinned + step;
    if (spans.has(next)) pin(next);
  });
  addEventListener("resize", unpin);
  $("sequences").addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-sequence]");
    if (row && !row.classList.contains("absent")) showSequence(Number(row.dataset.sequence));
  });
  $("worst").addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-token]");
    if (!row) return;
    const i = Number(row.dataset.token);
    if (sequenceOf(i) !== sequence) showSequence(sequenceOf(i));
    pin(i);
  });
  $("filters").addEventListener("input", readFilters);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("reset", () => setTimeout(readFilters));
  $("extreme").addEventListener("click", () => { $("size-low").value = data.extreme; readFilters(); });
  $("sort").addEventListener("change", sortSequences);
  $("scale").addEventListener("change", () => showSequence(sequence));
  $("dumps").addEventListener("change", () => load(Number($("dumps").value)));
}

async function start() {
  if (!data.dumps.length) return;
  options($("dumps"), data.dumps.map(({ name }, i) => [i, name]));
  $("dumps").value = data.dumps.length - 1;
  $("which").hidden = data.dumps.length < 2;
  options($("scale"), [["", "by the dump"], ...SCALE.map((step, i) => [i, `up to ${step}`]).slice(4)]);
  $("dump").hidden = false;
  listen();
  await load(data.dumps.length - 1);
}

start();
