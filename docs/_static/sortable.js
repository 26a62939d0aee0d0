// Tables in a container "sortable" are sorted by a click on a heading: numbers as numbers, what is none last.
document.querySelectorAll(".sortable table").forEach((table) => {
  const body = table.tBodies[0];
  const value = (row, column) => row.cells[column].textContent.trim();
  const compare = (a, b, sign) => {
    const [x, y] = [parseFloat(a), parseFloat(b)];
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
    return sign * (isNaN(x) ? a.localeCompare(b) : x - y);
  };
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const sign = heading.ariaSort === "ascending" ? -1 : 1;
      [...table.tHead.rows[0].cells].forEach((other) => (other.ariaSort = null));
      heading.ariaSort = sign < 0 ? "descending" : "ascending";
      body.append(...[...body.rows].sort((a, b) => compare(value(a, column), value(b, column), sign)));
    });
  });
});
