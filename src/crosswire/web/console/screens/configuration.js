// The effective configuration, and what of it waits for a restart.

import * as api from "../api.js";
import { el, emptyState, notice, put } from "../dom.js";
import { duration, name, plural, size, visible } from "../format.js";
import { plainTable } from "../table.js";

const GENERAL = "general";

export async function show(screen) {
  const { effective, waiting } = await api.get("/v1/configuration", {}, screen.signal);
  screen.heading("Configuration", { subtitle: "What holds now, defaults included. Secrets are hidden. It is changed in the configuration file, and reloaded with SIGHUP." });
  screen.root.append(waiting.length ? waitingView(waiting) : notice("good", "Nothing waits for a restart: all settings of the file are in effect."));

  const settings = Object.entries(effective).flatMap(([section, value]) => flat(section, value));
  const shown = el("div", {});
  const filter = el("input", { type: "search", id: "setting-filter", value: screen.query.contains ?? "", autocomplete: "off", spellcheck: "false",
    oninput: () => { screen.setQuery({ contains: filter.value.trim() }, { replace: true }); list(); } });
  screen.root.append(el("div", { class: "filters" }, el("div", { class: "field wide" }, el("label", { for: "setting-filter" }, "Name or value contains"), filter)), shown);
  list();

  function list() {
    const wanted = filter.value.trim().toLowerCase();
    const found = settings.filter(([key, value]) => `${key} ${JSON.stringify(value)}`.toLowerCase().includes(wanted));
    const sections = new Map();
    for (const setting of found) {
      const section = setting[0].includes(".") ? setting[0].split(".")[0] : GENERAL;
      sections.set(section, [...(sections.get(section) ?? []), setting]);
    }
    put(shown, found.length ? [...sections].map(([section, rows]) => el("section", { class: "panel settings" },
      el("h2", {}, el("code", {}, visible(section))), plainTable({
        caption: `Settings of ${visible(section)}`,
        rows,
        columns: [
          { title: "Setting", cell: ([key]) => el("code", {}, name(key)) },
          { title: "Value", cell: ([key, value]) => [valueView(value), readable(key, value)] },
        ],
      }))) : emptyState("No setting matches.", "All settings are in docs/reference/configuration.md."));
  }
}

function waitingView(waiting) {
  return el("section", { class: "panel" },
    notice("warn", `${plural(waiting.length, "setting")} of the file ${waiting.length === 1 ? "waits" : "wait"} for a restart.`),
    plainTable({
      caption: "Settings that wait for a restart",
      rows: waiting,
      columns: [
        { title: "Setting", cell: (row) => el("code", {}, name(row.name)) },
        { title: "In effect", cell: (row) => valueView(row.effective) },
        { title: "After a restart", cell: (row) => valueView(row.configured) },
      ],
    }));
}

function valueView(value) {
  if (value === null || value === "") return el("span", { class: "muted" }, value === null ? "not set" : "empty");
  return el("code", {}, name(typeof value === "string" ? value : JSON.stringify(value)));
}

/** A large number for people; the number itself is what the file has. */
function readable(key, value) {
  const format = key.endsWith("_bytes") ? size : key.endsWith("_s") ? duration : null;
  if (format === null || typeof value !== "number" || value < (format === size ? 1024 : 60)) return null;
  return el("span", { class: "muted" }, ` (${format(value)})`);
}

/** Settings by their dotted names; lists of tables are numbered. */
function flat(key, value) {
  if (Array.isArray(value) && value.some((each) => each !== null && typeof each === "object")) {
    return value.flatMap((each, index) => flat(`${key}.${each?.name ?? index + 1}`, each));
  }
  if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
    return Object.entries(value).flatMap(([name_, each]) => flat(`${key}.${name_}`, each));
  }
  return [[key, value]];
}
