// Text to tokens and back, and the chat template. Knows no model; a template is a stranger's program,
// which runs in the page's worker and can be ended with it.

import { Template } from "./text/jinja.js";
import { Tokenizer } from "./text/tokenizers.js";

const NAMED = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"];
const MARK = "\u2402answer\u2403"; // stands for an answer that is in the cache
const UNFINISHED = "\ufffd"; // how a letter looks whose last bytes are still to come

export class Words {
  /**
   * @param {object} tokenizer tokenizer.json
   * @param {object} config tokenizer_config.json
   * @param {?string} template chat_template.jinja
   */
  constructor(tokenizer, config, template) {
    this.tokenizer = new Tokenizer(tokenizer, config);
    const listed = Array.isArray(config.chat_template)
      ? config.chat_template.find(({ name }) => name === "default")?.template : config.chat_template;
    if (!(template ?? listed)) throw new Error("it has no chat template, so it cannot chat");
    this.template = new Template(template ?? listed);
    this.special = Object.fromEntries(NAMED.flatMap((name) => {
      const found = config[`${name}_token`], text = found?.content ?? found;
      return typeof text === "string" ? [[`${name}_token`, text]] : [];
    }));
    if (!this.encode("Hello").length) throw new Error("its vocabulary has no letters");
  }

  encode(text) {
    return Array.from(this.tokenizer.encode(text, { add_special_tokens: false }).ids, Number);
  }

  /** The conversation as the template writes it, ready for an answer. */
  render(messages) {
    return this.template.render({
      messages, add_generation_prompt: true, tools: null, documents: null, ...this.special,
    });
  }

  /** The text of a message behind an answer that is in the cache; closes the answer's turn. */
  renderTurn(message) {
    const before = [{ role: "user", content: "." }, { role: "assistant", content: MARK }];
    const text = this.render([...before, message]), at = text.indexOf(MARK);
    if (at < 0) throw new Error("its chat template rewrites earlier answers, so a conversation cannot go on");
    return text.slice(at + MARK.length);
  }

  /** Gives the text of generated tokens piece by piece, whole letters only. */
  stream() {
    const kept = [];
    let before = "";
    return (token) => {
      kept.push(token);
      const text = this.tokenizer.decode(kept, { skip_special_tokens: true, clean_up_tokenization_spaces: false });
      if (text.endsWith(UNFINISHED)) return "";
      const piece = text.slice(before.length);
      // Only the last tokens are decoded again: what stands before decides at most a space.
      if (kept.length > 16) kept.splice(0, 15);
      before = kept.length > 1 ? text : this.tokenizer.decode(kept, { skip_special_tokens: true, clean_up_tokenization_spaces: false });
      return piece;
    };
  }
}
