// The table of samples: search, choice, sorting, pictures. It draws a page of rows at a time.

const PAGE = 25;
const COLUMNS = [
  // [title, key to sort by, or null]
  ["pictures", null], ["step", "step"], ["set", "kind"], ["row", "row"], ["prompt", null], ["response", null],
  ["answer", null], ["reward", "reward"], ["tokens", "length"],
];
const CHOICES = [
  ["all samples", () => true],
  ["best and worst of each step", (row) => row.rank !== ""],
  ["best of each step", (row) => row.rank === "best"],
  ["worst of each step", (row) => row.rank === "worst"],
  ["cut at the longest length", (row) => row.cut],
  ["without a reward", (row) => row.reward == null],
];

function samples() {
  const { rows, texts, pictures, total } = DATA.samples;
  if (!rows.length) return;
  const lower = texts.map((text) => text.toLowerCase());
  const kinds = [...new Set(rows.map((row) => row.kind))];
  const view = { search: "", choice: 0, kind: "", run: "", step: "", sort: "step", down: true, shown: PAGE };
  Object.assign(view, memory.get("sessionStorage", "samples"));
  const columns = COLUMNS.filter(([title]) => title !== "pictures" || rows.some((row) => row.images.length));
  const body = el("tbody");
  const count = el("output");
  const more = el("button", { type: "button", onclick: () => { view.shown += PAGE; draw(); } }, "show more");
  const head = el("tr");

  function chosen() {
    const words = view.search.toLowerCase();
    const test = CHOICES[view.choice][1];
    const found = rows.filter((row) => test(row) && (!view.kind || row.kind === view.kind)
      && (view.run === "" || row.run === +view.run) && (view.step === "" || row.step === +view.step)
      && (!words || [row.prompt, row.response, row.answer].some((text) => lower[text].includes(words))));
    const sign = view.down ? -1 : 1;
    // What has no value comes last either way; equal ones stay in the order of the log.
    return found.sort((a, b) => {
      const [x, y] = [a[view.sort], b[view.sort]];
      if (x == null || y == null) return (x == null) - (y == null);
      return x < y ? -sign : x > y ? sign : 0;
    });
  }

  function draw() {
    memory.set("sessionStorage", "samples", view);
    const found = chosen();
    body.replaceChildren(...found.slice(0, view.shown).map((row) => line(row)));
    count.textContent = `${found.length} of ${total}` + (rows.length < total ? ` (${rows.length} are in this page)` : "");
    more.hidden = found.length <= view.shown;
    head.replaceChildren(...columns.map(([title, key]) => {
      const state = key === view.sort ? (view.down ? "descending" : "ascending") : null;
      const arrow = state ? (view.down ? " ↓" : " ↑") : "";
      const sort = () => {
        view.down = key === view.sort ? !view.down : true;
        view.sort = key;
        draw();
      };
      return el("th", { "aria-sort": state }, key ? el("button", { type: "button", onclick: sort }, title + arrow) : title);
    }));
  }

  function line(row) {
    const cells = {
      pictures: el("td", {}, el("div", { class: "pictures" }, ...row.images.map(picture))),
      step: el("td", { class: "number", "data-label": "step" }, String(row.step)),
      set: el("td", { class: "number" }, row.kind, MANY ? el("div", { class: "parts" }, DATA.runs[row.run].name) : null),
      row: el("td", { class: "number", "data-label": "row" }, row.row == null ? "" : String(row.row)),
      prompt: el("td", { "data-label": "prompt" }, text(row.prompt)),
      response: el("td", { "data-label": "response" }, text(row.response)),
      answer: el("td", { "data-label": "answer" }, text(row.answer)),
      reward: reward(row),
      tokens: el("td", { class: "number", "data-label": "tokens" }, row.length == null ? "" : String(row.length),
        row.cut ? el("div", { class: "failed" }, "cut") : null),
    };
    return el("tr", {}, ...columns.map(([title]) => cells[title]));
  }

  function reward(row) {
    const value = row.reward == null ? "failed" : number(row.reward);
    const parts = Object.entries(row.rewards || {}).filter(([key]) => key !== "overall")
      .map(([key, part]) => el("div", { class: "parts" }, `${key} ${number(part)}`));
    const rest = Object.entries(row.rest).map(([key, part]) =>
      el("div", { class: "parts" }, `${key} ${typeof part === "string" ? part : JSON.stringify(part)}`.slice(0, 200)));
    return el("td", { "data-label": "reward" },
      el("span", { class: "reward " + (row.reward == null ? "failed" : row.rank) }, value),
      row.rank ? el("span", { class: "parts" }, ` ${row.rank}`) : null, ...parts, ...rest);
  }

  function text(index) {
    const content = texts[index];
    const long = content.length > 600 || content.split("\n").length > 7;
    const box = el("div", { class: long ? "text short" : "text" }, ...highlighted(content, view.search));
    if (!long) return box;
    const button = el("button", { type: "button", class: "more", onclick: () => {
      const short = box.classList.toggle("short");
      button.textContent = short ? "show all" : "show less";
    } }, "show all");
    return el("div", {}, box, button);
  }

  function picture(name) {
    if (!(name in pictures)) return el("span", {}, name.startsWith("<") ? name : "picture not kept");
    const open = () => {
      const box = el("dialog", { onclick: () => box.close(), onclose: () => box.remove() },
        el("img", { src: pictures[name], alt: "picture of the prompt, larger" }));
      document.body.append(box);
      box.showModal();
    };
    return el("button", { type: "button", title: "larger", onclick: open },
      el("img", { src: pictures[name], alt: "picture of the prompt" }));
  }

  function choice(name, label, entries) {
    const select = el("select", { "aria-label": label, onchange: () => { view[name] = select.value; again(); } },
      ...entries.map(([value, title]) => el("option", { value }, title)));
    select.value = String(view[name]);
    return select;
  }

  function again() {
    view.shown = PAGE;
    draw();
  }

  const search = el("input", { type: "search", placeholder: "search prompts, responses, answers", "aria-label": "search samples",
    oninput: () => { view.search = search.value; again(); } });
  search.value = view.search;
  const steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b);
  section("Samples",
    el("div", { class: "tools" }, search,
      choice("choice", "which samples", CHOICES.map(([title, test], i) => [i, title, test])
        .filter(([, , test]) => rows.some(test)).map(([i, title]) => [i, title])),
      kinds.length > 1 ? choice("kind", "set", [["", "every set"], ...kinds.map((kind) => [kind, kind])]) : null,
      choice("step", "step", [["", "every step"], ...steps.map((step) => [step, "step " + step])]),
      MANY ? choice("run", "run", [["", "every run"], ...DATA.runs.map((run, i) => [i, run.name])]) : null, count),
    el("div", { class: "scroll" }, el("table", { class: "samples" }, el("thead", {}, head), body)),
    el("div", { class: "tools" }, more));
  draw();
}

/** The text with what was searched for marked, as nodes. */
function highlighted(content, words) {
  if (!words) return [content];
  const parts = [];
  const lower = content.toLowerCase();
  let at = 0;
  for (let next; (next = lower.indexOf(words.toLowerCase(), at)) >= 0 && parts.length < 200; at = next + words.length) {
    parts.push(content.slice(at, next), el("mark", {}, content.slice(next, next + words.length)));
  }
  return [...parts, content.slice(at)];
}
