// Where the fields of a frame are, and which field a byte belongs to.

/** A path as one text, for comparisons and for the URL. */
export function pathText(path) {
  return path.map((step) => encodeURIComponent(String(step))).join("/");
}

/** A path for people: data.items[0].name. */
export function pathName(path) {
  return path.map((step, index) =>
    (typeof step === "number" ? `[${step}]` : `${index ? "." : ""}${step}`)).join("");
}

export class FrameRanges {
  /** `rows` as the API has them. */
  constructor(rows) {
    this.rows = rows;
    this.byPath = new Map();
    for (const row of rows) {
      if (row.field) this.byPath.set(pathText(row.path), row);
    }
  }

  /** The range of a field; of one that has none the whole of what it contains; null for neither. */
  of(path) {
    const key = pathText(path);
    const found = this.byPath.get(key);
    if (found) return found;
    const inside = this.rows.filter((row) => row.field && pathText(row.path).startsWith(`${key}/`));
    if (inside.length === 0) return null;
    return {
      path,
      field: true,
      start: Math.min(...inside.map((row) => row.start)),
      end: Math.max(...inside.map((row) => row.end)),
    };
  }

  /** The innermost range with this byte; null if it is in none. */
  at(byte) {
    let best = null;
    for (const row of this.rows) {
      if (byte < row.start || byte >= row.end) continue;
      const size = row.end - row.start;
      const known = best ? best.end - best.start : Infinity;
      if (size < known || (size === known && (row.field && (!best.field || row.path.length > best.path.length)))) best = row;
    }
    return best;
  }

  /** The bytes that are no field: lengths, types, padding. */
  get layout() {
    return this.rows.filter((row) => !row.field);
  }
}
