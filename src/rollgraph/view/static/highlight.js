// Marks what was searched for, without touching the text: ranges that the browser paints.

const NAME = "search";

/** Marks `text`, in whatever case, in all text below `root`. Browsers that cannot do it show the text unmarked. */
export function highlight(root, text) {
  if (!CSS.highlights) return;
  CSS.highlights.delete(NAME);
  if (!text) return;
  const found = new Highlight();
  for (const nodes of stretches(root)) markIn(nodes, text.toLowerCase(), found);
  CSS.highlights.set(NAME, found);
}

/** Text nodes that people read as one text: the tokens of a turn are, and everything else stands alone. */
function stretches(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const found = [];
  let before = null;
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const box = node.parentElement.closest(".token") && node.parentElement.closest(".text");
    if (box && box === before) found.at(-1).push(node);
    else found.push([node]);
    before = box;
  }
  return found;
}

function markIn(nodes, wanted, found) {
  const whole = nodes.map(({ data }) => data).join("");
  const text = whole.toLowerCase();
  if (text.length !== whole.length) return; // a letter whose small form is longer: places would be wrong
  const place = placesIn(nodes);
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
    const range = new Range();
    range.setStart(...place(at));
    range.setEnd(...place(at + wanted.length));
    found.add(range);
  }
}

/** Finds the node, and the place in it, of places in the whole text. They are asked for in order. */
function placesIn(nodes) {
  let number = 0;
  let before = 0;
  return (at) => {
    while (at > before + nodes[number].length) {
      before += nodes[number].length;
      number += 1;
    }
    return [nodes[number], at - before];
  };
}
