// Routes in the fragment of the address: every screen, and what is sorted, filtered and open on
// it, has a URL of its own.

/** A route: `path` such as "/queues/:name", and `load`, which imports its screen. */
let routes = [];
let showScreen = () => {};
let current = null;

/** Starts with a table of routes; `show(route, params, query)` is called for each navigation. */
export function start(table, show) {
  routes = table.map((route) => ({ ...route, parts: route.path.split("/").slice(1) }));
  showScreen = show;
  window.addEventListener("hashchange", navigate);
  navigate();
}

export function stop() {
  window.removeEventListener("hashchange", navigate);
}

/** The fragment of a screen: href("/queues/:name", {name: "a/b"}, {tab: "policy"}). */
export function href(path, params = {}, query = {}) {
  const filled = path.split("/").map((part) =>
    part.startsWith(":") ? encodeURIComponent(String(params[part.slice(1)])) : part).join("/");
  return `#${filled}${queryText(query)}`;
}

function queryText(query) {
  const given = Object.entries(query).filter(
    ([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(given.map(([key, value]) => [key, String(value)])).toString();
  return text ? `?${text}` : "";
}

/** Goes to a screen. */
export function go(target) {
  if (location.hash === target) navigate();
  else location.hash = target;
}

/** Shows the current screen again. */
export function navigate() {
  const found = parse(location.hash);
  current = found;
  showScreen(found.route, found.params, found.query);
}

/**
 * Changes the query of the current screen without showing it anew: the screen does that itself.
 * `replace`: without a step in the history.
 */
export function setQuery(changes, { replace = false } = {}) {
  const query = { ...current.query, ...changes };
  for (const key of Object.keys(query)) {
    if (query[key] === "" || query[key] === null || query[key] === undefined) delete query[key];
  }
  const target = `#${current.path}${queryText(query)}`;
  current.query = query;
  if (target === location.hash) return query;
  if (replace) history.replaceState(null, "", target);
  else history.pushState(null, "", target);
  return query;
}

/** Whether a path is that of the current screen, or one below it. */
export function isCurrent(path) {
  const here = current?.path ?? "/";
  return path === "/" ? here === "/" : here === path || here.startsWith(`${path}/`);
}

function parse(hash) {
  const [path, text = ""] = splitOnce(hash.replace(/^#/, "") || "/", "?");
  const query = Object.fromEntries(new URLSearchParams(text));
  const parts = path.split("/").slice(1);
  for (const route of routes) {
    const params = match(route.parts, parts);
    if (params !== null) return { route, params, query, path };
  }
  return { route: null, params: {}, query, path };
}

function splitOnce(text, separator) {
  const index = text.indexOf(separator);
  return index < 0 ? [text] : [text.slice(0, index), text.slice(index + 1)];
}

function match(pattern, parts) {
  if (pattern.length !== parts.length) return null;
  const params = {};
  for (let index = 0; index < pattern.length; index += 1) {
    if (pattern[index].startsWith(":")) {
      try {
        params[pattern[index].slice(1)] = decodeURIComponent(parts[index]);
      } catch {
        return null; // a broken escape in an address that was typed in
      }
      if (!parts[index]) return null;
    } else if (pattern[index] !== parts[index]) return null;
  }
  return params;
}
