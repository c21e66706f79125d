// Where things are shown: the one table of the addresses that screens link to.

import { el } from "./dom.js";
import { name, nameLink, visible } from "./format.js";
import { href } from "./router.js";

export const toQueue = (queue, query) => href("/queues/:name", { name: queue }, query);
export const toTopic = (topic, query) => href("/topics/:name", { name: topic }, query);
export const toService = (service) => href("/services", {}, { contains: service });
export const toSubscription = (subscription, owner = "") =>
  href("/subscriptions/:name", { name: subscription }, { owner });
export const toMessage = (id) => href("/messages/:id", { id });
export const toConnection = (id) => href("/connections/:id", { id });
export const toDeadLetters = (queue, query) => href("/dead/:queue", { queue }, query);
export const toDeadLetter = (queue, id) => href("/dead/:queue/:id", { queue, id });
export const toUser = (user) => href("/users", {}, { contains: user });
export const toTail = (destination) => href("/tail", {}, { destination });
export const toSearch = (query) => href("/messages", {}, query);

/** The queue whose dead letters a destination has (`queue/orders/dead` → `orders`), or null. */
export function deadLettersOf(destination) {
  const found = /^queue\/(.+)\/dead$/s.exec(destination);
  return found ? found[1] : null;
}

/** A link to a queue, topic, service or the dead letters that a destination names. */
export function destinationLink(destination) {
  const [kind, ...rest] = destination.split("/");
  const short = rest.join("/");
  const dead = deadLettersOf(destination);
  if (dead !== null) return nameLink(toDeadLetters(dead), destination);
  if (kind === "queue" && short) return nameLink(toQueue(short), destination);
  if (kind === "topic" && short) return nameLink(toTopic(short), destination);
  if (kind === "service" && short) return nameLink(toService(short), destination);
  return name(destination);
}

export function messageLink(id) {
  return el("a", { href: toMessage(id), class: "id" }, String(id));
}

/** A link to a connection; a dash for steps of the hub itself, plain text for HTTP. */
export function connectionLink(id) {
  if (!id) return el("span", { class: "muted" }, "–");
  return el("a", { href: toConnection(id), class: "id" }, el("bdi", {}, visible(id)));
}
