"use strict";
// Markdown of a model as elements. What a model writes is a stranger's: its HTML is shown as text, and what the library
// makes of the rest passes a sanitiser that knows a few tags and web addresses alone.
const Markdown = (() => {
  const TAGS = ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "em", "strong", "del", "code", "pre", "blockquote",
    "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a", "sub", "sup", "kbd", "b", "i", "u", "s"];
  const RULES = {ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
    ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i, ADD_URI_SAFE_ATTR: ["align", "start"],
    ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true};
  const HARMLESS = /^<\/?(?:br|sub|sup|kbd|b|i|u|s)\s*\/?>$/i;
  const NAMED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"};
  const escaped = text => text.replace(/[&<>"']/g, character => NAMED[character]);

  const library = new marked.Marked({gfm: true, breaks: false, async: false});
  library.use({renderer: {
    html: ({text, block}) => {
      if (HARMLESS.test(text.trim())) return text;
      return block ? `<p class="html">${escaped(text.trimEnd())}</p>` : escaped(text);
    },
    // a picture would tell its server who reads this
    image: ({href, text}) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({checked}) => (checked ? "☑ " : "☐ "),
  }});
  DOMPurify.addHook("afterSanitizeAttributes", node => {
    if (node.nodeName !== "A") return;
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  });

  // A block of code under a line with its language and a button that copies it.
  function framed(pre, button) {
    const frame = document.createElement("div"), line = document.createElement("div"), name = document.createElement("span");
    const language = /(?:^|\s)language-(\S+)/.exec(pre.firstElementChild?.className || "");
    name.textContent = language ? language[1] : "code";
    frame.className = "code";
    line.append(name, button(() => pre.textContent));
    pre.replaceWith(frame);
    pre.tabIndex = 0;  // it may scroll
    frame.append(line, pre);
  }
  function block(token, button) {
    const box = document.createElement("div");
    try {
      box.append(DOMPurify.sanitize(library.parser([token]), RULES));
    } catch {  // too deep for the parser
      box.className = "html";
      box.textContent = token.raw;
    }
    box.querySelectorAll("pre").forEach(pre => framed(pre, button));
    return box;
  }

  // Brings an element up to a text. Blocks that are as they were stay: a selection in them lasts, and the cost of a long
  // text does not grow with its length. `button` makes the button that copies what its argument returns.
  function draw(element, text, button) {
    let tokens;
    try {
      tokens = library.lexer(text);
    } catch {  // a thousand quotations in each other, say
      element.drawn = [];
      element.textContent = text;
      return;
    }
    const defines = tokens.some(token => token.type === "def");  // what links of any block mean
    tokens = tokens.filter(token => token.type !== "space" && token.type !== "def");
    const drawn = element.drawn ||= [];
    let same = 0;
    while (!defines && same < tokens.length && drawn[same] === tokens[same].raw) same++;
    while (element.childNodes.length > same) element.lastChild.remove();
    drawn.length = same;
    for (const token of tokens.slice(same)) {
      element.append(block(token, button));
      drawn.push(token.raw);
    }
  }
  return {draw};
})();
