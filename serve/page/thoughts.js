// Parts what a model thought from what it says. Servers give thoughts as `reasoning_content`; without
// that they stand in the text, before `</think>`, where a template may have written the `<think>`.

const OPENED = /^\s*<think>(.*?)(?:<\/think>\s*(.*)|$)/s;
const CLOSED = /^(.*?)(?:^|\n)<\/think>(?:\n\s*(.*)|$)/s;

/** What an answer thought and says, so far. */
export function parted({ content, reasoning_content: given }) {
  if (given) return { thoughts: given.trim(), text: content };
  const [, thoughts, text = ""] = OPENED.exec(content) ?? CLOSED.exec(content) ?? [null, "", content];
  return { thoughts: thoughts.trim(), text };
}
