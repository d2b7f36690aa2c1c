// `looked(frame, isOpen)` looks at the page in a frame: [height, findings]. `isOpen`: first open everything that folds.

// Chromium 88 has no checkVisibility. There, what is in a closed <details> has no boxes.
function isVisible(element) {
  return !element.checkVisibility || element.checkVisibility();
}

function textBoxes(page) {
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  const boxes = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.data.trim() || !isVisible(node.parentElement)) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width > 1) boxes.push({ text: node.data.trim().slice(0, 60), node, box });
  }
  return boxes;
}

function overlaps(a, b) {  // more than rounding, in both directions
  const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  return across > 2 && down > 3;
}

function looked(frame, isOpen) {
  const page = frame.contentDocument;
  if (isOpen) page.querySelectorAll("details").forEach((found) => { found.open = true; });
  const width = frame.clientWidth, findings = [];
  if (page.documentElement.scrollWidth > width)
    findings.push(`the page is ${page.documentElement.scrollWidth} wide, the window ${width}`);
  page.querySelectorAll(".scroll").forEach((table) => {
    if (table.scrollWidth > table.clientWidth)
      findings.push(`a table is ${table.scrollWidth} wide, its place ${table.clientWidth}: ${table.innerText.slice(0, 60)}`);
  });
  const boxes = textBoxes(page).sort((a, b) => a.box.top - b.box.top);
  if (boxes.length < 10) findings.push(`only ${boxes.length} pieces of text are visible`);
  boxes.forEach((one, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].box.top < one.box.bottom; j++)
      if (boxes[j].node !== one.node && overlaps(one.box, boxes[j].box))
        findings.push(`"${one.text}" overlaps "${boxes[j].text}"`);
    const svg = one.node.parentElement.closest("svg");
    const around = (svg || page.documentElement).getBoundingClientRect();
    // In <pre>, spaces hang over the end of a line; what makes the page wider was found above.
    const hangs = one.node.parentElement.closest("pre") !== null;
    if (one.box.left < around.left - 1 || (one.box.right > around.right + 1 && !hangs))
      findings.push(`"${one.text}" is cut off at the side`);
    if (svg && (one.box.top < around.top - 1 || one.box.bottom > around.bottom + 1))
      findings.push(`"${one.text}" is cut off above or below`);
  });
  return [Math.ceil(page.documentElement.scrollHeight), findings];
}
