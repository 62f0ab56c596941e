"use strict";
// Everything below adds to a page that is complete without it.

// Strips: one stop of the Tab key each, arrow keys inside, Escape hides what is shown about a token.
for (const strip of document.querySelectorAll(".strip")) {
  const tokens = [...strip.querySelectorAll(".token")];
  tokens.forEach((token, k) => { token.tabIndex = k ? -1 : 0; });
  strip.addEventListener("keydown", (event) => {
    const here = tokens.indexOf(document.activeElement);
    if (event.key === "Escape") { strip.classList.add("quiet"); return; }
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (here < 0 || to === undefined || !tokens[to]) return;
    event.preventDefault();
    strip.classList.remove("quiet");
    tokens[here].tabIndex = -1;
    tokens[to].tabIndex = 0;
    tokens[to].focus();
  });
  strip.addEventListener("pointerenter", () => strip.classList.remove("quiet"));
  strip.addEventListener("focusout", () => strip.classList.remove("quiet"));
}

// Heat maps: the value under the pointer, or under a mark that the arrow keys move.
for (const plot of document.querySelectorAll("[data-heat]")) {
  const { frame: [left, top, width, height], values, names, unit } = JSON.parse(plot.querySelector("script").textContent);
  const readout = plot.parentElement.querySelector(".readout");
  const across = values.length, up = values[0].length;
  const mark = plot.appendChild(document.createElement("div"));
  mark.className = "cross";
  mark.hidden = true;
  let token = 0, layer = 0;
  const hint = "Point at a cell, or use the arrow keys.";
  readout.textContent = hint;
  const show = () => {
    const value = values[token][layer];
    readout.textContent = `token ${token} ‘${names[token]}’, layer ${layer}: ${value === null ? "–" : value.toPrecision(3)} (${unit})`;
    mark.hidden = false;
    mark.style.left = `${100 * (left + width * token / across)}%`;
    mark.style.top = `${100 * (top + height * (1 - (layer + 1) / up))}%`;
    mark.style.width = `${100 * width / across}%`;
    mark.style.height = `${100 * height / up}%`;
  };
  const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width - left) / width;
    const y = ((event.clientY - box.top) / box.height - top) / height;
    if (x < 0 || x >= 1 || y < 0 || y >= 1) return;
    token = clamp(Math.floor(x * across), across);
    layer = clamp(Math.floor((1 - y) * up), up);
    show();
  });
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!move) return;
    event.preventDefault();
    if (!mark.hidden) {
      token = clamp(token + move[0], across);
      layer = clamp(layer + move[1], up);
    }
    show();
  });
  plot.addEventListener("pointerleave", () => { mark.hidden = true; readout.textContent = hint; });
}

// Paper has no way to unfold: texts are printed whole, tables of numbers where the reader has opened them.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details.text")) part.open = true;
});
