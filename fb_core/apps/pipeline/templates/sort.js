"use strict";
/* A click on a column's head sorts its table: numbers largest first, words by name, empty cells last. */
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  if (body.rows.length < 3) continue;
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.onclick = () => {
      const numeric = head.className === "r";
      const before = head.ariaSort;
      const rising = before ? before === "descending" : !numeric;
      const key = (row) => {
        const text = row.cells[head.cellIndex].textContent.replaceAll(",", "");
        return numeric ? parseFloat(text) : text;
      };
      const empty = (value) => value === "" || Number.isNaN(value);
      const order = (a, b) => numeric ? a - b : a.localeCompare(b, undefined, { numeric: true });
      const rows = Array.from(body.rows, (row) => [key(row), row]);
      rows.sort(([a], [b]) => empty(a) - empty(b) || (empty(a) ? 0 : rising ? order(a, b) : order(b, a)));
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      head.ariaSort = rising ? "ascending" : "descending";
      body.append(...rows.map(([, row]) => row));
    };
  }
}
