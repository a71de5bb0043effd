// Draws the next token by the settings of generation, as `generation.py` of the ONNX Runtime backend
// does: rules and order are those of transformers. Knows no model.

// A temperature or `top_p` below it leaves the likeliest token alone, as 0 does.
const LEAST = 1e-20;

/** The first of the largest numbers. */
export function argmax(numbers) {
  let best = 0;
  for (let i = 1; i < numbers.length; i++) if (numbers[i] > numbers[best]) best = i;
  return best;
}

function softmax(scores) {
  const most = scores.reduce((a, b) => Math.max(a, b));
  const powers = scores.map((score) => Math.exp(score - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

/** The scores with those of tokens that are never drawn at -Infinity. */
function narrowed(scores, { top_k: count, top_p: mass, min_p: least }) {
  let found = scores;
  if (count) {
    const limit = Float32Array.from(found).sort()[found.length - Math.min(count, found.length)];
    found = found.map((score) => (score < limit ? -Infinity : score));
  }
  if (mass && mass !== 1) {
    const shares = softmax(found), order = Array.from(found.keys()).sort((a, b) => found[a] - found[b]);
    found = Float32Array.from(found);
    let sum = 0;
    for (const token of order.slice(0, -1)) { // the likeliest always stays
      sum += shares[token];
      if (sum > 1 - mass) break;
      found[token] = -Infinity;
    }
  }
  if (least) {
    const shares = softmax(found), limit = least * shares.reduce((a, b) => Math.max(a, b));
    found = found.map((score, token) => (shares[token] < limit ? -Infinity : score));
  }
  return found;
}

/**
 * The next token.
 * @param {Float32Array} logits of the vocabulary
 * @param {number[]} recent tokens that a repetition penalty looks at
 * @param {object} settings the manifest's `generation`, null where unset
 */
export function drawn(logits, recent, settings) {
  const { do_sample, temperature, repetition_penalty: penalty } = settings;
  let scores = Float32Array.from(logits);
  if (penalty && penalty !== 1) {
    for (const token of new Set(recent)) scores[token] *= scores[token] < 0 ? penalty : 1 / penalty;
  }
  const small = (value) => typeof value === "number" && value < LEAST;
  if (!do_sample || small(temperature) || small(settings.top_p)) return argmax(scores);
  if (temperature && temperature !== 1) scores = scores.map((score) => score / temperature);
  const shares = softmax(narrowed(scores, settings));
  let left = Math.random() * shares.reduce((a, b) => a + b);
  for (let token = 0; token < shares.length; token++) if (shares[token] && (left -= shares[token]) < 0) return token;
  return argmax(shares);
}
