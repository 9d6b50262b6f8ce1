"use strict";
// Chooses and sorts the rows of the page: they are all there already.

const rows = [...document.querySelectorAll("tbody tr")];
const states = [...document.querySelectorAll("button[data-state]")];
const lists = [...document.querySelectorAll("select[data-by]")];
const find = document.getElementById("find");

function choose() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = states.filter((each) => each.getAttribute("aria-pressed") === "true").map((each) => each.dataset.state);
  let left = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !(
      words.every((word) => text.includes(word)) &&
      (!wanted.length || wanted.includes(row.dataset.state)) &&
      lists.every((list) => !list.value || row.dataset[list.dataset.by] === list.value)
    );
    left += !row.hidden;
  }
  document.getElementById("found").textContent = `${left} of ${rows.length} runs`;
}

function sort(head, column) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const each of head.parentElement.children) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.children[column].dataset.sort ?? row.children[column].textContent.trim();
  const compared = (a, b) => (a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b, "en", { numeric: true }));
  rows.sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last, either way
    return down ? compared(b, a) : compared(a, b);
  });
  document.querySelector("tbody").append(...rows);
}

function begin() {
  document.documentElement.classList.add("js");
  find.addEventListener("input", choose);
  for (const list of lists) list.addEventListener("change", choose);
  for (const button of states)
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      choose();
    });
  [...document.querySelectorAll("thead th")].forEach((head, column) => {
    if (head.textContent === "curve") return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sort(head, column));
    head.replaceChildren(button);
  });
  choose();
}

if (find) begin();
