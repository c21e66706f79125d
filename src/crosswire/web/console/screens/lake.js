// The lake: its tables, files and gaps, the disk, and the pipeline's last report.

import * as api from "../api.js";
import { toast } from "../dialog.js";
import { el, emptyState, put, tile } from "../dom.js";
import { ago, count, name, plural, size, time, visible } from "../format.js";
import { href } from "../router.js";
import { plainTable, serverTable } from "../table.js";

const TABLES = [["", "any"], ["messages", "messages"], ["ledger", "ledger"], ["wire", "wire"], ["gaps", "gaps"]];
const TABS = { tables: "Tables", files: "Files", gaps: "Gaps" };

export async function show(screen) {
  const tab = screen.query.tab in TABS ? screen.query.tab : "tables";
  screen.heading("Lake", { subtitle: "What the hub took in and what became of it, as Parquet files for Spark, DuckDB and others." });
  const tiles = el("div", { class: "tiles" });
  const report = el("section", { class: "panel" }, el("h2", {}, "The pipeline's last report"));
  const [lake, disk, last] = await Promise.all([
    api.get("/v1/lake", {}, screen.signal), api.get("/v1/disk", {}, screen.signal), api.get("/v1/report", {}, screen.signal)]);
  showTiles(tiles, lake, disk);
  report.append(reportView(screen, last, lake.path));
  screen.root.append(tiles, report,
    el("nav", { class: "tabs", "aria-label": "Parts of the lake" }, Object.entries(TABS).map(([key, text]) =>
      el("a", { href: href("/lake", {}, { tab: key === "tables" ? "" : key }), "aria-current": key === tab ? "page" : null }, text))),
    { tables: () => tablesOf(lake), files: () => filesOf(screen), gaps: () => gapsOf(screen) }[tab]());
}

function showTiles(tiles, lake, disk) {
  const waiting = Math.max(lake.committed_row - lake.sealed_row, 0);
  put(tiles,
    tile("Lake", disk.lake ? size(disk.lake.size_bytes) : "none", disk.lake ? plural(disk.lake.files, "file") : "it is switched off"),
    tile("Store", size(disk.store.size_bytes), plural(disk.store.files, "file")),
    tile("Free", size((disk.lake ?? disk.store).free_bytes), `of ${size((disk.lake ?? disk.store).total_bytes)}`, null, disk.has_room ? "" : "bad"),
    tile("Not in files yet", count(waiting), "rows of the ledger"),
    tile("Gaps", count(lake.tables.filter((each) => each.table === "gaps").reduce((sum, each) => sum + each.files, 0)), "files of what is missing", href("/lake", {}, { tab: "gaps" })));
}

function reportView(screen, last, path) {
  const how = [el("p", {}, "The hub does not run the pipeline. Where it is run, write the page into the hub's data directory:"),
    el("pre", { class: "payload", tabindex: "0", "aria-label": "Commands" }, `crosswire pipeline run --input ${visible(path) || "LAKE"} --output tables\ncrosswire report --input tables --output ${visible(last.path) || "DATA/report.html"}`)];
  if (!last.made) return el("div", {}, emptyState("There is no report yet."), how);
  const open = el("button", { type: "button", class: "primary", onclick: async () => {
    try {
      const { path } = await api.post("/v1/report/open", {}, screen.signal);
      window.open(path, "_blank", "noopener");
    } catch (error) {
      toast("bad", error.message);
    }
  } }, "Open the report");
  return el("div", {},
    el("p", {}, "Written ", time(last.made, { day: true }), " (", ago(last.made), `), ${size(last.size_bytes)}.`),
    screen.session.administer ? el("p", {}, open, el("span", { class: "muted" }, " in a new tab, which has no access to this console"))
      : el("p", { class: "muted" }, "It shows traffic of all users: opening it needs the right to administer."),
    el("details", {}, el("summary", {}, "How to make a new one"), how));
}

function tablesOf(lake) {
  return plainTable({
    caption: "Tables of the lake",
    rows: lake.tables,
    empty: emptyState("The lake has no files yet.", "A file is finished some seconds after its first row. Without any, look at ", el("code", {}, "[lake]"), " in the ", el("a", { href: "#/configuration" }, "configuration"), "."),
    columns: [
      { title: "Table", cell: (row) => el("a", { href: href("/lake", {}, { tab: "files", table: row.table }) }, visible(row.table)) },
      { title: "Node", hide: true, cell: (row) => name(row.node) },
      { title: "Files", number: true, cell: (row) => count(row.files) },
      { title: "Size", number: true, cell: (row) => size(row.size_bytes) },
      { title: "Rows", number: true, cell: (row) => `${count(row.first_seq)} to ${count(row.last_seq)}` },
      { title: "Dates", cell: (row) => (row.first_date === row.last_date ? row.last_date : `${row.first_date} to ${row.last_date}`) },
    ],
  });
}

function filesOf(screen) {
  return serverTable(screen, {
    caption: "Files of the lake",
    load: (query, signal) => api.get("/v1/lake/files", query, signal),
    rows: (page) => page.files,
    keyOf: (row) => row.path,
    sort: "newest",
    filters: [
      { name: "table", label: "Table", options: TABLES },
      { name: "date", label: "Date", type: "date" },
    ],
    columns: [
      { title: "File", cell: (row) => el("span", { class: "mono" }, name(row.path)) },
      { title: "Table", hide: true, cell: (row) => visible(row.table) },
      { title: "Date", sort: "newest", number: true, cell: (row) => row.date },
      { title: "Rows", number: true, cell: (row) => `${count(row.first_seq)} to ${count(row.last_seq)}` },
      { title: "Size", sort: "size", number: true, cell: (row) => size(row.size_bytes) },
    ],
    empty: (isFiltered) => (isFiltered
      ? emptyState("No file matches.", el("a", { href: "#/lake?tab=files" }, "Show all files"))
      : emptyState("The lake has no files yet.", "A file is finished some seconds after its first row.")),
  });
}

function gapsOf(screen) {
  return serverTable(screen, {
    caption: "What the lake will never have",
    load: (query, signal) => api.get("/v1/lake/gaps", query, signal),
    rows: (page) => page.gaps,
    keyOf: (row) => `${row.table} ${row.first}`,
    sort: "newest",
    filters: [{ name: "table", label: "Table", options: TABLES }],
    columns: [
      { title: "Table", sort: "table", cell: (row) => visible(row.table) },
      { title: "Missing", sort: "rows", falling: true, cell: (row) => `${row.table === "messages" ? "messages" : "rows"} ${count(row.first)} to ${count(row.last)}` },
      { title: "Why", cell: (row) => name(row.reason) },
      { title: "Recorded", sort: "newest", falling: true, cell: (row) => time(row.time) },
    ],
    empty: (isFiltered) => emptyState(isFiltered ? "This table has no gaps." : "The lake has no gaps.", "Rows are given up only if the lake can't be written for long; they would be listed here."),
  });
}
