// Returns how many texts a page shows, and what is wrong with how they look.
(() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const wide = document.documentElement.clientWidth, found = [];
  const colour = (text) => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  for (let node; (node = walk.nextNode()); ) {
    const at = node.parentElement;
    if (!node.textContent.trim() || at.closest("script, style, title, noscript")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter((box) => box.width > 0);
    if (!boxes.length) continue;
    texts++;
    const words = node.textContent.trim().slice(0, 40);
    if (boxes.some((box) => box.left < -0.5 || box.right > wide + 0.5)) found.push(`cut at the edge: ${words}`);
    const plot = at.closest("svg");
    if (plot) {
      const own = plot.getBoundingClientRect();
      if (boxes.some((box) => box.left < own.left - 0.5 || box.right > own.right + 0.5 || box.bottom > own.bottom + 0.5 || box.top < own.top - 0.5))
        found.push(`cut by its plot: ${words}`);
      if (boxes.some((box) => box.height < 9)) found.push(`too small: ${words}`);
    }
    let ground = null, shown = 1;
    for (let each = at; each; each = each.parentElement) {
      const style = getComputedStyle(each), own = colour(style.backgroundColor);
      if (!ground && own[3] > 0) ground = own;
      shown *= Number(style.opacity);
    }
    const style = getComputedStyle(at), ink = colour(at.closest("svg") ? style.fill : style.color);
    const mixed = ink.slice(0, 3).map((c, i) => c * shown * ink[3] + (ground || [255, 255, 255])[i] * (1 - shown * ink[3]));
    const pair = [light(mixed), light(ground || [255, 255, 255])].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < 4.5) found.push(`contrast ${contrast.toFixed(2)}: ${words}`);
  }
  for (const each of document.body.querySelectorAll("*")) {
    const style = getComputedStyle(each);
    if (style.overflowX !== "visible" && !each.closest("svg") && each.scrollWidth > each.clientWidth + 1 && each.clientWidth)
      found.push(`scrolls sideways: ${each.tagName} ${each.className}`);
  }
  if (document.documentElement.scrollWidth > wide) found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  return [texts, [...new Set(found)].slice(0, 20)];
})()
