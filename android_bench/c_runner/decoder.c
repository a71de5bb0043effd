/* A whole decoder of kvcap's export: its loop over two kinds of graphs, and what of it is timed.
 *
 * The twin of runner/decoder.py. Past and present of a layer are one buffer, bound as input and as output; an evictor
 * says which slots go, and survivors move into the holes. Of a layer that slides the last tokens stay, in their order.
 * Policies that keep state or look at queries are refused. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  Tensor keys, values, positions; /* [1, K, slots, D], [1, K, slots]; no positions where it slides */
  const cJSON *reads;             /* inputs of its evictor */
  Session *evictor;
  int budget, held;
  bool rotates, slides;
} Layer;

typedef struct {
  Layer *layers;
  int count, heads, size, capacity; /* layers, KV heads, numbers of a key; the most slots */
  int block, every, lengths, vocabulary, seen;
  bool counts, interleaved; /* whether the graph is told how many tokens were read */
  int pairs;
  float *table; /* cosines and sines of each shift [span, 2, pairs] */
  Session *graph, **evictors;
  int evictor_count;
  Tensor ids, held, seen_now, logits, stay, pinned, gone, places;
  Tensor *inputs, *outputs;
  char (*names)[32];
  int *order; /* of a sort */
} Decoder;

static bool tensor(Tensor *made, const char *name, Type type, int rank, const int64_t *dims, Fault *fault) {
  *made = (Tensor){.name = name, .type = type, .rank = rank};
  for (int i = 0; i < rank; i++) made->dims[i] = dims[i];
  resize(made);
  made->data = calloc(1, made->bytes ? made->bytes : 1);
  return made->data || fail(fault, "there is no memory for %zu bytes of %s", made->bytes, name);
}

static Tensor shaped(const Tensor *whole, const char *name, int rank, const int64_t *dims) {
  Tensor part = *whole;
  part.name = name, part.rank = rank;
  for (int i = 0; i < rank; i++) part.dims[i] = dims[i];
  resize(&part);
  return part;
}

static const cJSON *item(const cJSON *object, const char *name) {
  const cJSON *found = cJSON_GetObjectItemCaseSensitive(object, name);
  if (!found) quit(2, "the decoder's manifest lacks %s", name);
  return found;
}

/* Buffers of all layers, as the manifest lists them. */
static bool make_layers(Decoder *made, const cJSON *facts, Fault *fault) {
  const cJSON *entry, *budget, *windows = cJSON_GetObjectItemCaseSensitive(facts, "windows");
  made->count = cJSON_GetArraySize(list_of(facts, "budgets"));
  made->layers = calloc((size_t)made->count, sizeof *made->layers);
  int at = 0;
  cJSON_ArrayForEach(budget, list_of(facts, "budgets")) {
    made->layers[at].budget = budget->valueint;
    made->layers[at].slides = cJSON_IsNumber(cJSON_GetArrayItem(windows, at));
    made->layers[at].rotates = cJSON_IsTrue(cJSON_GetArrayItem(list_of(facts, "rotates"), at));
    at++;
  }
  cJSON_ArrayForEach(entry, list_of(facts, "state")) {
    const char *name = text_of(entry, "name");
    Layer *layer = &made->layers[(int)number_of(entry, "layer")];
    Tensor *into = !strcmp(name, "keys") ? &layer->keys : !strcmp(name, "values") ? &layer->values
                 : !strcmp(name, "positions") ? &layer->positions : NULL;
    if (!into) return fail(fault, "the C runner runs no policy that keeps %s; --browser does", name);
    int64_t dims[MAX_RANK] = {0};
    int rank = 0;
    const cJSON *size;
    cJSON_ArrayForEach(size, list_of(entry, "full"))
      if (rank < MAX_RANK) dims[rank++] = (int64_t)size->valuedouble;
    const char *type = text_of(entry, "dtype");
    Type kind = !strcmp(type, "int32") ? INT32 : !strcmp(type, "float16") ? FLOAT16 : FLOAT32;
    if (!tensor(into, name, kind, rank, dims, fault)) return false;
    if (layer->slides) continue;
    made->heads = (int)dims[1];
    if (rank == 4) made->size = (int)dims[3];
    if (dims[2] > made->capacity) made->capacity = (int)dims[2];
  }
  return true;
}

static bool make_table(Decoder *made, const cJSON *facts, Fault *fault) {
  const cJSON *frequency;
  int span = made->capacity + 1, at = 0;
  made->pairs = cJSON_GetArraySize(list_of(facts, "inv_freq"));
  made->table = malloc(sizeof(float) * 2 * (size_t)(span * made->pairs + 1));
  if (!made->table) return fail(fault, "there is no memory for a table of rotations");
  cJSON_ArrayForEach(frequency, list_of(facts, "inv_freq")) {
    for (int shift = 0; shift < span; shift++) {
      made->table[(shift * 2) * made->pairs + at] = (float)cos(shift * frequency->valuedouble);
      made->table[(shift * 2 + 1) * made->pairs + at] = (float)sin(shift * frequency->valuedouble);
    }
    at++;
  }
  return true;
}

static bool load_graphs(Decoder *made, const cJSON *facts, const char *folder, int threads, Fault *fault) {
  const cJSON *entry, *layer, *port;
  char path[8192];
  cJSON_ArrayForEach(port, list_of(facts, "outputs")) {
    const char *name = text_of(port, "name");
    if (strncmp(name, "present_", 8) && strcmp(name, "logits"))
      return fail(fault, "the C runner runs no policy that looks at %s; --browser does", name);
  }
  made->evictors = calloc((size_t)cJSON_GetArraySize(list_of(facts, "evictors")), sizeof *made->evictors);
  cJSON_ArrayForEach(entry, list_of(facts, "evictors")) {
    snprintf(path, sizeof path, "%s/%s", folder, text_of(entry, "file"));
    Session *session = open_session(path, threads, fault);
    if (!session) return false;
    made->evictors[made->evictor_count++] = session;
    cJSON_ArrayForEach(layer, list_of(entry, "layers")) {
      made->layers[layer->valueint].evictor = session;
      made->layers[layer->valueint].reads = list_of(entry, "inputs");
    }
  }
  snprintf(path, sizeof path, "%s/%s", folder, text_of(item(item(facts, "graphs"), "decoder"), "file"));
  made->graph = open_session(path, threads, fault);
  return made->graph != NULL;
}

static bool make_decoder(Decoder *made, const cJSON *facts, const char *folder, int every, int threads, Fault *fault) {
  if (!make_layers(made, facts, fault) || !load_graphs(made, facts, folder, threads, fault)) return false;
  made->block = (int)number_of(facts, "block_size"), made->every = every;
  const cJSON *port;
  cJSON_ArrayForEach(port, list_of(facts, "inputs")) made->counts |= !strcmp(text_of(port, "name"), "seen");
  made->interleaved = cJSON_IsTrue(item(facts, "interleaved"));
  made->vocabulary = (int)number_of(item(facts, "model"), "vocabulary");
  for (int i = 0; i < made->count; i++) { /* budgets, each once */
    int j = 0;
    while (made->layers[j].budget != made->layers[i].budget) j++;
    made->lengths += j == i;
  }
  int64_t ids[] = {1, made->block}, lengths[] = {made->lengths}, spans[] = {1, 2}, words[] = {1, made->vocabulary};
  int64_t rows[] = {1, made->heads, made->capacity};
  int ports = 3 + 2 * made->count;
  made->inputs = calloc((size_t)ports, sizeof(Tensor)), made->outputs = calloc((size_t)ports, sizeof(Tensor));
  made->names = calloc(4 * (size_t)made->count, sizeof *made->names);
  made->order = malloc(sizeof(int) * (size_t)made->capacity);
  return make_table(made, facts, fault) && tensor(&made->ids, "input_ids", INT64, 2, ids, fault) &&
         tensor(&made->held, "held", INT32, 1, lengths, fault) && tensor(&made->seen_now, "seen", INT32, 0, NULL, fault) &&
         tensor(&made->stay, "stay", INT32, 0, NULL, fault) && tensor(&made->pinned, "pinned", INT32, 2, spans, fault) &&
         tensor(&made->logits, "logits", FLOAT32, 2, words, fault) && tensor(&made->gone, "gone", INT64, 3, rows, fault) &&
         tensor(&made->places, "positions", INT32, 3, rows, fault);
}

static void forget(Decoder *made) {
  for (int i = 0; i < made->count; i++) {
    free(made->layers[i].keys.data), free(made->layers[i].values.data), free(made->layers[i].positions.data);
  }
  for (int i = 0; i < made->evictor_count; i++) close_session(made->evictors[i]);
  if (made->graph) close_session(made->graph);
  void *all[] = {made->layers, made->evictors, made->table, made->ids.data, made->held.data, made->seen_now.data,
                 made->stay.data, made->pinned.data, made->logits.data, made->gone.data, made->places.data,
                 made->inputs, made->outputs, made->names, made->order};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static double held_bytes(const Decoder *made) {
  double bytes = 0;
  for (int i = 0; i < made->count; i++)
    bytes += (double)(made->layers[i].keys.bytes + made->layers[i].values.bytes + made->layers[i].positions.bytes);
  return bytes + 8.0 * (made->capacity + 1) * made->pairs;
}

static int room(const Decoder *made) {
  int least = made->block;
  for (int i = 0; i < made->count; i++) {
    int left = (int)made->layers[i].keys.dims[2] - made->layers[i].held;
    if (left < least) least = left;
  }
  return least;
}

static void turn_back(const Decoder *made, float *key, int shift) {
  if (!shift) return;
  const float *cosines = &made->table[2 * shift * made->pairs], *sines = cosines + made->pairs;
  int step = made->interleaved ? 2 : 1, other = made->interleaved ? 1 : made->pairs;
  for (int i = 0; i < made->pairs; i++) {
    float a = key[i * step], b = key[i * step + other];
    key[i * step] = a * cosines[i] + b * sines[i];
    key[i * step + other] = b * cosines[i] - a * sines[i];
  }
}

static int by_number(const void *a, const void *b) { return (*(const int *)a > *(const int *)b) - (*(const int *)a < *(const int *)b); }

static void move_slot(Tensor *x, int head, int from, int to) {
  size_t row = x->bytes / (size_t)(x->dims[1] * x->dims[2]);
  char *first = (char *)x->data + (size_t)head * (size_t)x->dims[2] * row;
  memcpy(first + (size_t)to * row, first + (size_t)from * row, row);
}

/* Evict the slots `gone` [K, count]: survivors behind the new `held` move into the holes before it. */
static void give_up(const Decoder *made, Layer *layer, int count) {
  int kept = layer->held - count, capacity = (int)layer->positions.dims[2];
  for (int head = 0; head < made->heads; head++) {
    const int64_t *gone = (const int64_t *)made->gone.data + (size_t)head * (size_t)count;
    int32_t *places = (int32_t *)layer->positions.data + (size_t)head * (size_t)capacity;
    for (int i = 0; i < count; i++) made->order[i] = places[gone[i]];
    qsort(made->order, (size_t)count, sizeof(int), by_number);
    for (int i = 0; i < count; i++) places[gone[i]] = -1; /* marks those that go */
    for (int i = 0, source = kept; i < count; i++) {
      if (gone[i] >= kept) continue;
      while (places[source] < 0) source++;
      move_slot(&layer->keys, head, source, (int)gone[i]);
      move_slot(&layer->values, head, source, (int)gone[i]);
      move_slot(&layer->positions, head, source++, (int)gone[i]);
    }
    if (!layer->rotates) continue;
    float *keys = (float *)layer->keys.data + (size_t)head * (size_t)capacity * (size_t)made->size;
    for (int slot = 0; slot < kept; slot++) {
      int low = 0, high = count; /* how many older ones went */
      while (low < high) {
        int middle = (low + high) / 2;
        if (made->order[middle] < places[slot]) low = middle + 1;
        else high = middle;
      }
      turn_back(made, keys + (size_t)slot * (size_t)made->size, low);
    }
  }
  layer->held = kept;
}

/* Keep a layer's last tokens: they move to the front. */
static bool slide(Layer *layer) {
  Tensor *both[] = {&layer->keys, &layer->values};
  for (int i = 0; i < 2; i++) {
    size_t row = both[i]->bytes / (size_t)(both[i]->dims[1] * both[i]->dims[2]);
    for (int64_t head = 0; head < both[i]->dims[1]; head++) {
      char *first = (char *)both[i]->data + (size_t)(head * both[i]->dims[2]) * row;
      memmove(first, first + (size_t)(layer->held - layer->budget) * row, (size_t)layer->budget * row);
    }
  }
  layer->held = layer->budget;
  return true;
}

static bool evict(Decoder *made, Layer *layer, Fault *fault) {
  if (layer->slides) return slide(layer);
  int count = layer->held - layer->budget, ins = 0;
  int64_t rows[] = {1, made->heads, layer->held}, out[] = {1, made->heads, count};
  const Tensor given[] = {layer->keys, layer->values, made->seen_now, made->stay, made->pinned,
                          shaped(&made->places, "positions", 3, rows)};
  Tensor inputs[MAX_PORTS], gone = shaped(&made->gone, "gone", 3, out);
  *(int32_t *)made->stay.data = layer->budget;
  for (int head = 0; head < made->heads; head++)
    memcpy((int32_t *)made->places.data + (size_t)head * (size_t)layer->held,
           (int32_t *)layer->positions.data + (size_t)head * (size_t)layer->positions.dims[2], sizeof(int32_t) * (size_t)layer->held);
  const cJSON *port;
  cJSON_ArrayForEach(port, layer->reads) {
    size_t i = 0;
    while (i < sizeof given / sizeof *given && strcmp(given[i].name, text_of(port, "name"))) i++;
    if (i == sizeof given / sizeof *given || ins == MAX_PORTS)
      return fail(fault, "the C runner runs no policy that reads %s; --browser does", text_of(port, "name"));
    inputs[ins++] = given[i];
  }
  if (!bind_tensors(layer->evictor, inputs, ins, &gone, 1, fault) || !run_session(layer->evictor, fault)) return false;
  give_up(made, layer, count);
  return true;
}

/* Slots in use of each budget, the largest first. */
static void say_held(Decoder *made) {
  int last = 0x7fffffff;
  for (int i = 0; i < made->lengths; i++) {
    int best = -1;
    for (int j = 0; j < made->count; j++)
      if (made->layers[j].budget < last && (best < 0 || made->layers[j].budget > made->layers[best].budget)) best = j;
    last = made->layers[best].budget;
    ((int32_t *)made->held.data)[i] = made->layers[best].held;
  }
}

/* Read a block and evict; the last token's logits are in `logits`. */
static bool run_block(Decoder *made, int length, Fault *fault) {
  int64_t ids[] = {1, length};
  int ins = 0, outs = 0;
  *(int32_t *)made->seen_now.data = made->seen;
  say_held(made);
  made->inputs[ins++] = shaped(&made->ids, "input_ids", 2, ids);
  made->inputs[ins++] = made->held;
  if (made->counts) made->inputs[ins++] = made->seen_now;
  made->outputs[outs++] = made->logits;
  for (int i = 0; i < made->count; i++) {
    Tensor *past[] = {&made->layers[i].keys, &made->layers[i].values};
    for (int j = 0; j < 2; j++) {
      char *in = made->names[4 * i + 2 * j], *out = made->names[4 * i + 2 * j + 1];
      snprintf(in, sizeof *made->names, "%s.%d", j ? "values" : "keys", i);
      snprintf(out, sizeof *made->names, "present_%s.%d", j ? "values" : "keys", i);
      made->inputs[ins] = made->outputs[outs] = *past[j];
      made->inputs[ins++].name = in, made->outputs[outs++].name = out;
    }
  }
  if (!bind_tensors(made->graph, made->inputs, ins, made->outputs, outs, fault) || !run_session(made->graph, fault)) return false;
  int least = length > 1 ? 1 : made->every;
  for (int i = 0; i < made->count; i++) {
    Layer *layer = &made->layers[i];
    for (int head = 0; head < made->heads && !layer->slides; head++)
      for (int t = 0; t < length; t++)
        ((int32_t *)layer->positions.data)[head * layer->positions.dims[2] + layer->held + t] = made->seen + t;
    layer->held += length;
  }
  made->seen += length;
  *(int32_t *)made->seen_now.data = made->seen;
  for (int i = 0; i < made->count; i++)
    if (made->layers[i].held - made->layers[i].budget >= least && !evict(made, &made->layers[i], fault)) return false;
  return true;
}

static void reset(Decoder *made) {
  made->seen = 0;
  for (int i = 0; i < made->count; i++) made->layers[i].held = 0;
}

static int likeliest(const Decoder *made) {
  const float *logits = made->logits.data;
  int best = 0;
  for (int i = 1; i < made->vocabulary; i++)
    if (logits[i] > logits[best]) best = i;
  return best;
}

static bool write_token(Decoder *made, int *token, Fault *fault) {
  *(int64_t *)made->ids.data = *token;
  if (!run_block(made, 1, fault)) return false;
  *token = likeliest(made);
  return true;
}

/* Read tokens of the plan's rule from an empty cache, in blocks. */
static bool read_text(Decoder *made, const cJSON *wanted, int count, Fault *fault) {
  uint32_t seed = (uint32_t)number_of(wanted, "seed");
  reset(made);
  while (made->seen < count) {
    int length = room(made) < count - made->seen ? room(made) : count - made->seen;
    for (int i = 0; i < length; i++)
      ((int64_t *)made->ids.data)[i] = hash11(seed, (uint32_t)(made->seen + i)) % (uint32_t)made->vocabulary;
    if (!run_block(made, length, fault)) return false;
  }
  return true;
}

static bool check_logits(Decoder *made, const cJSON *check, const char *folder, cJSON *row, Fault *fault) {
  const cJSON *run, *token = list_of(check, "prompt")->child;
  double allowed = number_of(check, "allowed"), error = 0;
  reset(made);
  cJSON_ArrayForEach(run, list_of(check, "runs")) {
    if (run->valueint > room(made)) return fail(fault, "the plan's check reads %d tokens at once", run->valueint);
    for (int i = 0; i < run->valueint && token; i++, token = token->next) ((int64_t *)made->ids.data)[i] = token->valueint;
    if (!run_block(made, run->valueint, fault)) return false;
  }
  float *expected = read_file(folder, text_of(check, "file"), made->logits.bytes, fault);
  if (!expected) return false;
  for (int i = 0; i < made->vocabulary; i++) {
    double off = fabs((double)((float *)made->logits.data)[i] - expected[i]);
    if (!(off <= error)) error = off; /* one that is no number stays */
  }
  free(expected);
  cJSON *found = cJSON_AddObjectToObject(row, "parity");
  cJSON_AddBoolToObject(found, "passed", error <= allowed);
  cJSON_AddItemToObject(found, "error", isfinite(error) ? cJSON_CreateNumber(error) : cJSON_CreateNull());
  cJSON_AddNumberToObject(found, "allowed", allowed);
  if (error > allowed || isnan(error)) {
    char text[80];
    snprintf(text, sizeof text, "logits differ by %.3g, allowed are %.3g", error, allowed);
    cJSON_AddStringToObject(found, "text", text);
  }
  return true;
}

static bool time_rounds(Decoder *made, const cJSON *wanted, int rounds, cJSON *row, Fault *fault) {
  cJSON *first = cJSON_AddArrayToObject(row, "first_ms"), *tokens = cJSON_AddArrayToObject(row, "token_us");
  cJSON *long_ms = cJSON_AddArrayToObject(row, "long_ms"), *windows;
  int many = (int)number_of(wanted, "long_tokens"), prompt = (int)number_of(wanted, "prompt_tokens"), token = 0;
  if (!read_text(made, wanted, made->block, fault)) return false; /* its memory is there afterwards */
  for (int round = 0; round < rounds; round++) {
    double start = now_us();
    if (!read_text(made, wanted, many, fault)) return false;
    cJSON_AddItemToArray(long_ms, cJSON_CreateNumber((now_us() - start) / 1000));
    start = now_us();
    if (!read_text(made, wanted, prompt, fault)) return false;
    token = likeliest(made);
    cJSON_AddItemToArray(first, cJSON_CreateNumber((now_us() - start) / 1000));
    cJSON *samples = cJSON_CreateArray();
    cJSON_AddItemToArray(tokens, samples);
    for (int i = 1; i < (int)number_of(wanted, "answer_tokens"); i++) {
      double before = now_us();
      if (!write_token(made, &token, fault)) return false;
      cJSON_AddItemToArray(samples, cJSON_CreateNumber(fmax(now_us() - before, 0.001)));
    }
  }
  int block = (int)number_of(wanted, "block"), evicting = (many + block - 1) / block - (int)number_of(wanted, "budget") / block;
  cJSON_AddNumberToObject(row, "evicting_blocks", evicting > 0 ? evicting : 0);
  windows = cJSON_AddArrayToObject(row, "sustained");
  double end = now_us() + number_of(wanted, "sustained_seconds") * 1e6, window = number_of(wanted, "window_seconds") * 1e6;
  for (double start; (start = now_us()) < end;) {
    double until = fmin(start + window, end);
    int count = 0;
    for (; !count || now_us() < until; count++)
      if (!write_token(made, &token, fault)) return false;
    cJSON *one = cJSON_CreateObject();
    cJSON_AddNumberToObject(one, "seconds", (now_us() - start) / 1e6);
    cJSON_AddNumberToObject(one, "tokens", count);
    cJSON_AddItemToArray(windows, one);
  }
  return true;
}

void visit_decoder(const cJSON *wanted, int threads, int rounds, const char *folder, cJSON *row) {
  char path[4096], beside[4096];
  snprintf(path, sizeof path, "%s/%s", folder, text_of(wanted, "manifest"));
  snprintf(beside, sizeof beside, "%s", path);
  *strrchr(beside, '/') = 0;
  Decoder made = {.count = 0};
  Fault fault = {""};
  double start = now_us();
  cJSON *facts = read_json(path);
  fprintf(stderr, "%s\n", text_of(wanted, "id"));
  bool ready = make_decoder(&made, facts, beside, (int)number_of(wanted, "evict_every"), threads, &fault);
  cJSON_AddNumberToObject(row, "load_ms", (now_us() - start) / 1000);
  ready = ready && check_logits(&made, item(wanted, "check"), folder, row, &fault) && time_rounds(&made, wanted, rounds, row, &fault);
  cJSON_AddNumberToObject(row, "held_bytes", held_bytes(&made));
  if (!ready) {
    static const char *const gone[] = {"load_ms", "parity", "first_ms", "token_us", "long_ms", "evicting_blocks", "sustained", "held_bytes"};
    bool lacks = strstr(fault.text, "runs no policy") != NULL;
    for (size_t i = 0; i < sizeof gone / sizeof *gone; i++) cJSON_DeleteItemFromObjectCaseSensitive(row, gone[i]);
    cJSON_ReplaceItemInObjectCaseSensitive(row, "status", cJSON_CreateString(lacks ? "skipped" : "failed"));
    cJSON_AddStringToObject(row, "reason", fault.text);
    fprintf(stderr, "%s: %s\n", text_of(wanted, "id"), fault.text);
  }
  forget(&made);
  cJSON_Delete(facts);
}
