/* Runs a plan on this device and writes what was measured:
 *
 *   kvcap-bench DIR/plan.json -o result.json [--csv cells.csv] [--threads 1,2] [--cores auto|none|7|4-7]
 *     [--provider cpu|xnnpack|nnapi|qnn] [--profile] [--lib ./libonnxruntime.so]
 *
 * The twin of the Python runner, for phones: same plan, same rules, same result. It does not judge: flags are made of
 * its samples later. Exit codes: 0 done, 1 no cell could be run, 2 wrong input. */
#include "bench.h"

#include <errno.h>
#include <getopt.h>
#include <libgen.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define VERSION "1"
enum { MAX_CORES = 64 };

typedef struct {
  const char *plan, *out, *csv, *library, *source, *provider;
  bool profile;
  int threads[MAX_CORES], thread_counts;
  int cores[MAX_CORES], core_counts; /* 0: held to none */
  bool biggest;                      /* as many of the biggest cores as there are threads */
} Options;

/* A list such as 1,2 or 4-7; every number is at least `least`. */
static int numbers(const char *text, int *into, int least) {
  int count = 0;
  for (const char *at = text;;) {
    char *end;
    long first = strtol(at, &end, 10), last = first;
    bool read = end != at;
    if (read && *end == '-') last = strtol(at = end + 1, &end, 10), read = end != at;
    if (!read || first < least || last < first || last - first >= MAX_CORES - count || (*end && *end != ','))
      quit(2, "%s will not work; a list such as 1,2 or 4-7 does", text);
    while (first <= last) into[count++] = (int)first++;
    if (!*end) return count;
    at = end + 1;
  }
}

static Options options_of(int count, char **given) {
  static const struct option known[] = {{"out", required_argument, 0, 'o'}, {"threads", required_argument, 0, 't'},
                                        {"cores", required_argument, 0, 'c'}, {"source", required_argument, 0, 's'},
                                        {"lib", required_argument, 0, 'l'}, {"csv", required_argument, 0, 'v'},
                                        {"provider", required_argument, 0, 'p'}, {"profile", no_argument, 0, 'f'}, {0}};
  Options options = {.library = "libonnxruntime.so", .source = "auto", .provider = "cpu", .biggest = true};
  for (int option; (option = getopt_long(count, given, "o:", known, NULL)) != -1;) {
    if (option == 'o') options.out = optarg;
    else if (option == 't') options.thread_counts = numbers(optarg, options.threads, 1);
    else if (option == 'c') {
      options.biggest = !strcmp(optarg, "auto");
      if (!options.biggest && strcmp(optarg, "none")) options.core_counts = numbers(optarg, options.cores, 0);
    } else if (option == 's' && (!strcmp(optarg, "auto") || !strcmp(optarg, "host") || !strcmp(optarg, "emulated"))) options.source = optarg;
    else if (option == 'l') options.library = optarg;
    else if (option == 'v') options.csv = optarg;
    else if (option == 'p') options.provider = optarg;
    else if (option == 'f') options.profile = true;
    else quit(2, "usage: kvcap-bench PLAN -o RESULT [--csv FILE] [--threads 1,2] [--cores auto|none|7|4-7] [--provider cpu|xnnpack|nnapi|qnn] [--profile] [--source auto|host|emulated] [--lib FILE]");
  }
  if (optind + 1 != count || !options.out) quit(2, "needed are one plan.json and -o RESULT");
  options.plan = given[optind];
  return options;
}

/* Threads and cores that were not asked for: the plan's, and the biggest. */
static void complete_options(Options *options, const cJSON *plan) {
  const cJSON *threads;
  if (!options->thread_counts)
    cJSON_ArrayForEach(threads, list_of(plan, "threads"))
      if (options->thread_counts < MAX_CORES) options->threads[options->thread_counts++] = (int)threads->valuedouble;
  int most = 1;
  for (int i = 0; i < options->thread_counts; i++)
    if (options->threads[i] > most) most = options->threads[i];
  if (options->biggest) options->core_counts = biggest_cores(options->cores, most < MAX_CORES ? most : MAX_CORES);
  if (options->core_counts && !hold_to_cores(options->cores, options->core_counts)) {
    if (!options->biggest) quit(2, "the cores that were asked for are not to be had");
    options->core_counts = 0;
  }
}

static uint32_t next_random(uint32_t *state) { /* xorshift32 */
  *state ^= *state << 13;
  *state ^= *state >> 17;
  *state ^= *state << 5;
  return *state;
}

static void shuffle(int *order, int count, uint32_t *state) {
  for (int i = count - 1; i > 0; i--) {
    int j = (int)(next_random(state) % (uint32_t)(i + 1)), kept = order[i];
    order[i] = order[j], order[j] = kept;
  }
}

static void copy_fields(cJSON *into, const cJSON *from, const char *const *names, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(from, names[i]);
    if (!value) quit(2, "the plan lacks %s", names[i]);
    cJSON_AddItemToObject(into, names[i], cJSON_Duplicate(value, true));
  }
}

static const char *sha256_of(const cJSON *plan, const char *file) {
  const cJSON *entry;
  cJSON_ArrayForEach(entry, list_of(plan, "files"))
    if (!strcmp(text_of(entry, "file"), file)) return text_of(entry, "sha256");
  quit(2, "the plan does not list %s among its files", file);
}

static cJSON *cell_result(const cJSON *plan, const cJSON *cell, int threads, const char *provider) {
  static const char *const names[] = {"id", "policy", "formulation", "dtype", "stage", "n", "queries", "budget", "opset", "bytes"};
  cJSON *made = cJSON_CreateObject();
  copy_fields(made, cell, names, sizeof names / sizeof *names);
  cJSON_AddStringToObject(made, "model_sha256", sha256_of(plan, text_of(cell, "model")));
  cJSON_AddNumberToObject(made, "threads", threads);
  cJSON_AddStringToObject(made, "provider_asked", provider);
  cJSON_AddNullToObject(made, "provider_got"); /* known after the first visit */
  cJSON_AddStringToObject(made, "status", "ok");
  return made;
}

/* Everything to be visited, with its place in the result document. */
static int make_visits(const cJSON *plan, const Options *options, cJSON *document, Visit **visits) {
  const cJSON *cell, *copies = list_of(plan, "baselines");
  int most = cJSON_GetArraySize(list_of(plan, "cells")) * options->thread_counts + cJSON_GetArraySize(copies), count = 0;
  cJSON *cells = cJSON_AddArrayToObject(document, "cells"), *baselines = cJSON_AddArrayToObject(document, "baselines");
  *visits = calloc((size_t)most, sizeof **visits);
  for (int t = 0; t < options->thread_counts; t++)
    cJSON_ArrayForEach(cell, list_of(plan, "cells")) {
      cJSON *made = cell_result(plan, cell, options->threads[t], options->provider);
      cJSON_AddItemToArray(cells, made);
      (*visits)[count++] = (Visit){cell, false, options->threads[t], made};
    }
  cJSON_ArrayForEach(cell, copies) {
    static const char *const names[] = {"id", "bytes"};
    cJSON *made = cJSON_CreateObject();
    copy_fields(made, cell, names, 2);
    cJSON_AddNumberToObject(made, "threads", 1);
    cJSON_AddItemToArray(baselines, made);
    (*visits)[count++] = (Visit){cell, true, 1, made};
  }
  for (int i = 0; i < count; i++) {
    cJSON_AddNumberToObject((*visits)[i].result, "runs_per_sample", 0); /* known after the first visit */
    cJSON_AddArrayToObject((*visits)[i].result, "samples_us");
  }
  return count;
}

static bool failed(const Visit *visit) {
  const cJSON *status = cJSON_GetObjectItemCaseSensitive(visit->result, "status");
  return status && strcmp(status->valuestring, "ok");
}

static void hold(const Visit *visit, const Options *options) {
  int held = options->biggest && visit->threads < options->core_counts ? visit->threads : options->core_counts;
  if (held) hold_to_cores(options->cores, held); /* before the session, whose threads are held to the same */
}

static bool make_visit(Visit *visit, const Rules *rules, const Options *options, const char *folder, cJSON *samples) {
  hold(visit, options);
  return visit->copy ? visit_copy(visit, rules, samples) : visit_cell(visit, rules, folder, samples);
}

static void measure(Visit *visits, int count, const Rules *rules, uint32_t seed, const Options *options,
                    const char *folder, cJSON *document) {
  int *order = calloc((size_t)count, sizeof *order);
  const Visit *first = NULL;
  for (int i = 0; i < count; i++) order[i] = i;
  for (int round = 0; round < rules->rounds; round++) {
    shuffle(order, count, &seed);
    for (int i = 0; i < count; i++) {
      Visit *visit = &visits[order[i]];
      if (failed(visit)) continue;
      cJSON *samples = cJSON_CreateArray();
      fprintf(stderr, "[%d/%d] %s\n", round * count + i + 1, rules->rounds * count, text_of(visit->cell, "id"));
      if (!make_visit(visit, rules, options, folder, samples)) {
        cJSON_Delete(samples);
        continue;
      }
      cJSON_AddItemToArray(cJSON_GetObjectItemCaseSensitive(visit->result, "samples_us"), samples);
      if (!first && !visit->copy) first = visit;
    }
  }
  free(order);
  if (!first || failed(first)) {
    cJSON_AddNullToObject(document, "repeat");
    return;
  }
  Visit again = *first;
  cJSON *repeat = cJSON_AddObjectToObject(document, "repeat");
  static const char *const names[] = {"id", "threads", "provider_asked", "runs_per_sample"};
  copy_fields(repeat, first->result, names, 4);
  make_visit(&again, rules, options, folder, cJSON_AddArrayToObject(repeat, "samples_us"));
}

/* The plan's decoder, once for each number of threads; nothing where it has none. */
static int measure_decoders(const cJSON *plan, const Options *options, int rounds, const char *folder, cJSON *document) {
  const cJSON *wanted = cJSON_GetObjectItemCaseSensitive(plan, "decoder");
  int measured = 0;
  if (!wanted) return 0;
  static const char *const names[] = {"id", "model", "policy", "positions", "dtype", "budget", "block", "evict_every",
                                      "weights_bytes", "state_bytes", "prompt_tokens", "answer_tokens", "long_tokens"};
  cJSON *rows = cJSON_AddArrayToObject(document, "decoders");
  for (int t = 0; t < options->thread_counts; t++) {
    cJSON *row = cJSON_CreateObject();
    copy_fields(row, wanted, names, sizeof names / sizeof *names);
    cJSON_AddStringToObject(row, "model_sha256", sha256_of(plan, text_of(wanted, "manifest")));
    cJSON_AddNumberToObject(row, "threads", options->threads[t]);
    bool cpu = !strcmp(options->provider, "cpu");
    cJSON_AddStringToObject(row, "provider_asked", options->provider);
    cJSON_AddItemToObject(row, "provider_got", cpu ? cJSON_CreateString("cpu") : cJSON_CreateNull());
    cJSON_AddStringToObject(row, "status", cpu ? "ok" : "skipped");
    cJSON_AddItemToArray(rows, row);
    if (!cpu) cJSON_AddStringToObject(row, "reason", "a decoder runs on the provider cpu only");
    if (!cpu) continue;
    int held = options->biggest && options->threads[t] < options->core_counts ? options->threads[t] : options->core_counts;
    if (held) hold_to_cores(options->cores, held);
    visit_decoder(wanted, options->threads[t], rounds, folder, row);
    measured += !strcmp(text_of(row, "status"), "ok");
  }
  return measured;
}

static void add_run(cJSON *document, const cJSON *plan, double seed) {
  char id[64] = "", started[40];
  FILE *random = fopen("/proc/sys/kernel/random/uuid", "r");
  if (!random || !fgets(id, sizeof id, random)) quit(1, "the system gives no random id");
  fclose(random);
  id[strcspn(id, "\n")] = 0;
  time_text(started);
  cJSON *run = cJSON_AddObjectToObject(document, "run");
  cJSON_AddStringToObject(run, "id", id);
  cJSON_AddStringToObject(run, "plan", text_of(plan, "id"));
  static const char *const names[] = {"preset", "reference"};
  copy_fields(run, plan, names, 2);
  cJSON_AddStringToObject(run, "started", started);
  cJSON_AddStringToObject(run, "runner", "c");
  cJSON_AddStringToObject(run, "runner_version", VERSION);
  cJSON_AddNumberToObject(run, "seed", seed);
  cJSON_AddBoolToObject(run, "complete", true);
  cJSON_AddArrayToObject(run, "interrupted");
}

static void add_runtime(cJSON *document, const Options *options, double timer_us) {
  cJSON *runtime = cJSON_AddObjectToObject(document, "runtime");
  cJSON_AddStringToObject(runtime, "name", "onnxruntime");
  cJSON_AddStringToObject(runtime, "version", runtime_version());
  cJSON_AddNumberToObject(runtime, "timer_us", round(timer_us * 1000) / 1000);
  cJSON_AddBoolToObject(runtime, "telemetry", false);
  cJSON_AddBoolToObject(runtime, "arena", true);
  cJSON_AddItemToObject(runtime, "cores", options->core_counts ? cJSON_CreateIntArray(options->cores, options->core_counts) : cJSON_CreateNull());
}

static void check_generator(const cJSON *plan) {
  const cJSON *check = list_of(cJSON_GetObjectItemCaseSensitive(plan, "generator"), "check"), *number;
  uint32_t i = 0;
  cJSON_ArrayForEach(number, check)
    if (hash11(1, i++) != (uint32_t)number->valuedouble) quit(2, "the plan's generator is not the one of this runner");
}

/* Refuse a place where no result can be written, before the hours that it takes. */
static void check_out(const char *path) {
  char part[PATH_MAX];
  snprintf(part, sizeof part, "%s.part", path);
  FILE *file = fopen(part, "wb");
  if (!file) quit(2, "%s cannot be written: %s", path, strerror(errno));
  fclose(file);
  unlink(part);
}

int main(int count, char **given) {
  Options options = options_of(count, given);
  cJSON *plan = read_json(options.plan);
  if (strcmp(text_of(plan, "schema"), "kvcap.android_plan/1")) quit(2, "%s is no kvcap.android_plan/1", options.plan);
  check_generator(plan);
  check_out(options.out);
  if (options.csv) check_out(options.csv), list_of(plan, "csv");
  const cJSON *section = cJSON_GetObjectItemCaseSensitive(plan, "rules");
  Rules rules = {(int)number_of(section, "warmup_runs"), (int)number_of(section, "min_runs"),
                 (int)number_of(section, "rounds"), number_of(section, "warmup_seconds") * 1e6,
                 number_of(section, "min_seconds") * 1e6, number_of(section, "max_timer_share"),
                 timer_step_us()};
  double seed = number_of(section, "seed");
  Fault fault = {""};
  if (!open_runtime(options.library, &fault)) quit(1, "%s", fault.text);
  if (!choose_provider(options.provider, &fault)) quit(2, "%s", fault.text);
  complete_options(&options, plan);

  cJSON *document = cJSON_CreateObject(), *found = cJSON_CreateObject();
  cJSON_AddStringToObject(document, "schema", "kvcap.android_bench/1");
  add_run(document, plan, seed);
  cJSON_AddItemToObject(document, "device", device_facts(options.source));
  add_runtime(document, &options, rules.timer_us);
  cJSON_AddItemToObject(document, "conditions", found);
  cJSON_AddItemToObject(found, "before", conditions());
  static const char *const names[] = {"shape", "rules"};
  copy_fields(document, plan, names, 2);
  char folder[PATH_MAX], finished[40];
  snprintf(folder, sizeof folder, "%s", options.plan);
  Visit *visits;
  int count_of_visits = make_visits(plan, &options, document, &visits), measured = 0;
  const char *beside = dirname(folder);
  measure(visits, count_of_visits, &rules, (uint32_t)seed * 2654435761u + 1, &options, beside, document);
  for (int i = 0; options.profile && i < count_of_visits; i++) {
    if (visits[i].copy || failed(&visits[i])) continue;
    hold(&visits[i], &options);
    profile_cell(&visits[i], beside, options.out);
  }
  measured += measure_decoders(plan, &options, rules.rounds, beside, document);
  cJSON_AddItemToObject(found, "after", conditions());
  cJSON_AddItemToObject(document, "memory", peak_memory());
  time_text(finished);
  cJSON_AddStringToObject(cJSON_GetObjectItemCaseSensitive(document, "run"), "finished", finished);
  for (int i = 0; i < count_of_visits; i++) {
    add_statistics(visits[i].result);
    if (visits[i].copy || failed(&visits[i])) continue;
    print_percentiles(visits[i].result);
    measured++;
  }
  if (!write_json(document, options.out, &fault)) quit(1, "%s", fault.text);
  if (options.csv && !write_csv(document, list_of(plan, "csv"), options.csv, &fault)) quit(1, "%s", fault.text);
  free(visits);
  cJSON_Delete(document);
  cJSON_Delete(plan);
  return measured ? 0 : 1;
}
