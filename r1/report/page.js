"use strict";
// The page's frame: data, theme, overview, settings. Texts from runs are only ever set as text, never as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const MANY = DATA.runs.length > 1;
const MAIN = document.getElementById("main");

/** An element: attributes as they are, on* as listeners; children are elements or text. */
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** The theme is for every report, the rest for this page. */
const key = (store, name) => `r1-report-${name}` + (store === "sessionStorage" ? window.location.pathname : "");

/** What the page remembers over a reload; a browser may refuse to keep it. */
const memory = {
  get(store, name) {
    try { return JSON.parse(window[store].getItem(key(store, name))); } catch { return null; }
  },
  set(store, name, value) {
    try { window[store].setItem(key(store, name), JSON.stringify(value)); } catch { /* private browsing */ }
  },
};

const number = (value) => {
  if (value == null) return "";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  if (size >= 1e6) return String(+(value / 1e6).toPrecision(3)) + "M";
  if (size >= 1e4) return String(+(value / 1e3).toPrecision(3)) + "k";
  return String(+value.toPrecision(4));
};

const runColor = (run) => `var(--c${run % 8})`;

function theme() {
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let choice = memory.get("localStorage", "theme") || "auto";
  const apply = () => {
    const dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[choice];
  };
  button.addEventListener("click", () => {
    choice = { auto: "light", light: "dark", dark: "auto" }[choice];
    memory.set("localStorage", "theme", choice);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

function section(title, ...children) {
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  MAIN.append(el("section", { id }, el("h2", {}, title), ...children));
}

function overview() {
  const cards = DATA.runs.map((run, i) => {
    const steps = run.num_steps ? `step ${run.step} of ${run.num_steps}` : `step ${run.step}`;
    const chips = [el("span", { class: "chip" }, steps)];
    if (run.started) chips.push(el("span", { class: "chip" }, "started " + run.started.slice(0, 16).replace("T", " ")));
    const tiles = run.tiles.map(([label, value, note]) =>
      el("div", { class: "tile" }, el("span", {}, label), el("b", {}, value), el("span", {}, note)));
    const troubles = run.troubles.map(([name, what, advice]) =>
      el("p", { class: "trouble" }, el("b", {}, name), ` ${what}. ${advice}.`));
    const dot = MANY ? el("span", { class: "dot", style: `background:${runColor(i)}` }) : null;
    return el("div", { class: "card" }, el("h3", {}, dot, run.name, ...chips), el("div", { class: "tiles" }, ...tiles), ...troubles);
  });
  MAIN.append(el("div", { class: "runs" }, ...cards));
}

/** A table of names and one value a run; which rows are shown is chosen above it. */
function values(title, rows, choices) {
  if (!rows.length) return;
  const body = el("tbody");
  const show = (test) => body.replaceChildren(...rows.filter(test).map((row) =>
    el("tr", { class: MANY && row.differs ? "differs" : "" }, el("td", {}, row.name), ...row.values.map((v) => el("td", {}, v)))));
  const usable = choices.filter(([, test]) => rows.some(test));
  const select = el("select", { "aria-label": title, onchange: () => show(usable[select.selectedIndex][1]) },
    ...usable.map(([label, test]) => el("option", {}, `${label} (${rows.filter(test).length})`)));
  show(usable[0][1]);
  const head = el("tr", {}, el("th", {}, "name"), ...DATA.runs.map((run) => el("th", {}, run.name)));
  section(title, usable.length > 1 ? el("div", { class: "tools" }, select) : null,
    el("div", { class: "scroll" }, el("table", { class: "settings" }, el("thead", {}, head), body)));
}

function bar(...controls) {
  const links = [...document.querySelectorAll("main section")].map((part) =>
    el("a", { href: "#" + part.id }, part.firstChild.textContent));
  document.getElementById("bar").append(el("div", {}, el("div", { class: "links" }, ...links), el("div", { class: "controls" }, ...controls)));
}

/** While a run goes on the page loads itself anew, and comes back to where it was. */
function refresh() {
  const place = memory.get("sessionStorage", "scroll");
  memory.set("sessionStorage", "scroll", null);
  if (place != null) window.scrollTo(0, place);
  if (!DATA.refresh_s) return;
  setInterval(() => {
    const busy = document.querySelector("dialog[open]") || String(window.getSelection()) || document.hidden;
    if (busy) return;
    memory.set("sessionStorage", "scroll", window.scrollY);
    window.location.reload();
  }, DATA.refresh_s * 1000);
}

document.addEventListener("DOMContentLoaded", () => {
  theme();
  overview();
  const controls = charts();
  samples();
  const all = ["all", () => true];
  values("Settings", DATA.settings, MANY
    ? [["that differ", (row) => row.differs], all]
    : [["not the default", (row) => row.changed], all]);
  values("Environment", DATA.environment, MANY ? [all, ["that differ", (row) => row.differs]] : [all]);
  bar(...controls);
  refresh();
});
