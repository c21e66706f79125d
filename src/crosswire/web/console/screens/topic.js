// One topic: its flow, who subscribed to it, and its stored messages.

import * as api from "../api.js";
import { openDialog } from "../dialog.js";
import { el, emptyState, put, tile } from "../dom.js";
import { count, duration, name, rate, settingsTable, short, size } from "../format.js";
import { toSearch, toTail, toTopic } from "../links.js";
import { facts, messageColumns } from "../message_view.js";
import { timeSeries } from "../plot.js";
import { publishDialog } from "../publish.js";
import { go, href } from "../router.js";
import { serverTable } from "../table.js";
import { subscriptionTable } from "./subscriptions.js";

const TABS = { recent: "Recent messages", subscriptions: "Named subscriptions", policy: "Policy" };

export async function show(screen) {
  const topic = screen.params.name;
  const destination = `topic/${topic}`;
  const path = api.apiPath("/v1/topics", topic);
  const tab = screen.query.tab in TABS ? screen.query.tab : "recent";
  let detail = await api.get(path, {}, screen.signal);

  screen.heading(el("span", {}, name(topic)), { back: [["Topics", "#/topics"]], actions: actions() });
  const tiles = el("div", { class: "tiles" });
  const flow = timeSeries({ title: "Messages per second", format: rate });
  screen.root.append(tiles, el("section", { class: "panel" }, flow),
    el("nav", { class: "tabs", "aria-label": "Parts of this topic" }, Object.entries(TABS).map(([key, text]) =>
      el("a", { href: toTopic(topic, { tab: key === "recent" ? "" : key }), "aria-current": key === tab ? "page" : null }, text))));

  function showFacts() {
    put(tiles,
      tile("In", rate(detail.rates.accepted), `${count(detail.published)} since the start`),
      tile("Out", rate(detail.rates.delivered), `failed ${rate(detail.rates.failed)}`),
      tile("Connections", short(detail.subscribers), "subscribed while they are there"),
      tile("Named subscriptions", short(detail.subscription_count), "keep their position", toTopic(topic, { tab: "subscriptions" })));
  }

  async function showPlots() {
    const stats = await api.get("/v1/stats", { destination }, screen.signal);
    const line = (label, measure, kind) => ({ label, kind, values: stats.series[measure] ?? [] });
    flow.update({ ...stats, lines: [line("published", "accepted_per_s", "a"), line("delivered", "delivered_per_s", "d"), line("failed", "failed_per_s", "bad")] });
  }

  showFacts();
  await showPlots();
  screen.root.append({ recent, subscriptions, policy }[tab]());
  screen.every(3000, async () => {
    try {
      detail = await api.get(path, {}, screen.signal);
      showFacts();
      await showPlots();
    } catch (error) {
      screen.fail(error, tiles);
    }
  });

  function recent() {
    return serverTable(screen, {
      caption: "Recent messages",
      load: (query, signal) => api.getExact("/v1/messages", { destination, ...query }, signal),
      rows: (page) => page.messages,
      keyOf: (row) => row.message.id,
      limit: 25,
      submit: "Search",
      sort: "newest",
      filters: [{ name: "text", label: "Text in payload or properties", wide: true }],
      tools: el("a", { class: "button", href: toSearch({ destination }) }, "Search with more"),
      columns: messageColumns((row) => row.message, { outcome: (row) => row.outcome, sorted: true }),
      empty: (isFiltered) => {
        if (isFiltered) return emptyState("No message matches.", "Messages are kept as long as the topic's retention, and the lake, keep them.");
        return detail.policy.durable ? emptyState("No message is known.", "Publish one to see it here.")
          : emptyState("Messages of this topic are not stored.", "A live tail shows them as they come.");
      },
    });
  }

  function subscriptions() {
    return subscriptionTable(screen, { topic });
  }

  function policy() {
    const rules = detail.policy;
    return el("section", { class: "panel" }, el("h2", {}, "Policy"), facts([
      ["Messages are stored", rules.durable ? "yes" : "no"],
      ["Kept for", rules.retention_s ? duration(rules.retention_s) : "ever"],
      ["Kept at most", rules.retention_bytes ? size(rules.retention_bytes) : "no limit"],
      ["Deleted by retention", detail.reclaimed ? `up to message ${detail.reclaimed}` : "nothing yet"],
      ["A subscriber that is too slow", rules.slow === "lag" ? "lags behind" : "is disconnected"],
      ["In the ledger", rules.durable ? null : rules.ledger === "counts" ? "one row for each message" : "one row for each delivery"],
    ]), el("p", { class: "muted" }, "Set in the configuration, in ", el("code", {}, settingsTable("topics", topic)), "."));
  }

  function actions() {
    return [
      el("a", { class: "button", href: toTail(destination) }, "Live tail"),
      el("button", { type: "button", onclick: () => publishDialog(destination, () => screen.reload()) }, "Publish…"),
      screen.session.administer ? el("button", { type: "button", class: "danger", onclick: remove }, "Delete…") : null,
    ];
  }

  function remove() {
    openDialog({
      title: "Delete this topic",
      text: el("p", {}, "Only an unused topic can be deleted: without messages, subscriptions, schedules and configuration."),
      action: "Delete the topic",
      danger: true,
      act: async () => {
        await api.del(path);
        return ["The topic ", name(topic), " is deleted."];
      },
      done: () => go(href("/topics")),
    });
  }
}
