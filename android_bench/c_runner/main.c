/* Runs a plan on this device and writes what was measured:
 *
 *   kvcap-bench DIR/plan.json -o result.json [--threads 1,2] [--cores 7,6] [--lib ./libonnxruntime.so]
 *
 * The twin of runner.py, for devices without Python: same plan, same rules, same result. It does not judge:
 * statistics and flags are made of its samples later. Exit codes: 0 done, 1 failed, 2 wrong input. */
#include "bench.h"

#include <getopt.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION "1"
enum { MAX_CORES = 64 };

typedef struct {
  const char *plan, *out, *library;
  int threads[MAX_CORES], thread_counts;
  int cores[MAX_CORES], core_counts; /* none: the biggest */
} Options;

static int numbers(const char *text, int *into, int least) {
  int count = 0;
  for (const char *at = text; count < MAX_CORES;) {
    char *end;
    long value = strtol(at, &end, 10);
    if (end == at || value < least || value > 1024 || (*end && *end != ',')) break;
    into[count++] = (int)value;
    if (!*end) return count;
    at = end + 1;
  }
  quit(2, "%s is no list of numbers such as 1,2", text);
}

static Options options_of(int count, char **given) {
  static const struct option known[] = {{"out", required_argument, 0, 'o'}, {"threads", required_argument, 0, 't'},
                                        {"cores", required_argument, 0, 'c'}, {"lib", required_argument, 0, 'l'}, {0}};
  Options options = {.library = "libonnxruntime.so"};
  for (int option; (option = getopt_long(count, given, "o:", known, NULL)) != -1;) {
    if (option == 'o') options.out = optarg;
    else if (option == 't') options.thread_counts = numbers(optarg, options.threads, 1);
    else if (option == 'c') options.core_counts = numbers(optarg, options.cores, 0);
    else if (option == 'l') options.library = optarg;
    else quit(2, "usage: kvcap-bench PLAN -o RESULT [--threads 1,2] [--cores 7,6] [--lib FILE]");
  }
  if (optind + 1 != count || !options.out) quit(2, "needed are one plan.json and -o RESULT");
  options.plan = given[optind];
  return options;
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

static cJSON *cell_result(const cJSON *plan, const cJSON *cell, int threads) {
  static const char *const names[] = {"id", "policy", "formulation", "dtype", "stage", "n", "queries", "budget", "opset", "bytes"};
  cJSON *made = cJSON_CreateObject();
  copy_fields(made, cell, names, sizeof names / sizeof *names);
  cJSON_AddStringToObject(made, "model_sha256", sha256_of(plan, text_of(cell, "model")));
  cJSON_AddNumberToObject(made, "threads", threads);
  cJSON_AddStringToObject(made, "provider_asked", "cpu");
  cJSON_AddStringToObject(made, "provider_got", "cpu");
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
      cJSON *made = cell_result(plan, cell, options->threads[t]);
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
    cJSON_AddNumberToObject((*visits)[i].result, "runs_per_sample", 1);
    cJSON_AddArrayToObject((*visits)[i].result, "samples_us");
  }
  return count;
}

static bool failed(const Visit *visit) {
  const cJSON *status = cJSON_GetObjectItemCaseSensitive(visit->result, "status");
  return status && strcmp(status->valuestring, "ok");
}

static bool make_visit(Visit *visit, const Rules *rules, const Options *options, const char *folder, cJSON *samples) {
  int held = visit->threads < options->core_counts ? visit->threads : options->core_counts;
  hold_to_cores(options->cores, held); /* before the session, whose threads are held to the same */
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
      fprintf(stderr, "round %d of %d, %d of %d: %s\n", round + 1, rules->rounds, i + 1, count, text_of(visit->cell, "id"));
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
  fprintf(stderr, "once more: %s\n", text_of(first->cell, "id"));
  make_visit(&again, rules, options, folder, cJSON_AddArrayToObject(repeat, "samples_us"));
}

static void add_run(cJSON *document, const cJSON *plan) {
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
  cJSON_AddBoolToObject(run, "complete", true);
  cJSON_AddArrayToObject(run, "interrupted");
}

static void add_runtime(cJSON *document, const Options *options, bool held) {
  cJSON *runtime = cJSON_AddObjectToObject(document, "runtime");
  cJSON_AddStringToObject(runtime, "name", "onnxruntime");
  cJSON_AddStringToObject(runtime, "version", runtime_version());
  cJSON_AddNumberToObject(runtime, "timer_us", timer_step_us());
  cJSON_AddBoolToObject(runtime, "telemetry", false);
  cJSON_AddBoolToObject(runtime, "arena", true);
  cJSON_AddItemToObject(runtime, "cores", held ? cJSON_CreateIntArray(options->cores, options->core_counts) : cJSON_CreateNull());
}

static void check_generator(const cJSON *plan) {
  const cJSON *check = list_of(cJSON_GetObjectItemCaseSensitive(plan, "generator"), "check"), *number;
  uint32_t i = 0;
  cJSON_ArrayForEach(number, check)
    if (hash11(1, i++) != (uint32_t)number->valuedouble) quit(2, "the plan's generator is not the one of this runner");
}

int main(int count, char **given) {
  Options options = options_of(count, given);
  cJSON *plan = read_json(options.plan);
  if (strcmp(text_of(plan, "schema"), "kvcap.android_plan/1")) quit(2, "%s is no kvcap.android_plan/1", options.plan);
  check_generator(plan);
  const cJSON *said = cJSON_GetObjectItemCaseSensitive(plan, "rules"), *threads;
  Rules rules = {(int)number_of(said, "warmup_runs"), (int)number_of(said, "min_runs"), (int)number_of(said, "rounds"),
                 number_of(said, "warmup_seconds") * 1e6, number_of(said, "min_seconds") * 1e6};
  if (!options.thread_counts)
    cJSON_ArrayForEach(threads, list_of(plan, "threads"))
      if (options.thread_counts < MAX_CORES) options.threads[options.thread_counts++] = (int)threads->valuedouble;
  int most = 1;
  for (int i = 0; i < options.thread_counts; i++) if (options.threads[i] > most) most = options.threads[i];
  if (!options.core_counts) options.core_counts = biggest_cores(options.cores, most < MAX_CORES ? most : MAX_CORES);
  Fault fault = {""};
  if (!open_runtime(options.library, &fault)) quit(1, "%s", fault.text);

  cJSON *document = cJSON_CreateObject();
  cJSON_AddStringToObject(document, "schema", "kvcap.android_bench/1");
  add_run(document, plan);
  cJSON_AddItemToObject(document, "device", device_facts());
  add_runtime(document, &options, hold_to_cores(options.cores, options.core_counts));
  cJSON *found = cJSON_AddObjectToObject(document, "conditions");
  cJSON_AddItemToObject(found, "before", conditions());
  static const char *const names[] = {"shape", "rules"};
  copy_fields(document, plan, names, 2);
  char folder[PATH_MAX];
  snprintf(folder, sizeof folder, "%s", options.plan);
  Visit *visits;
  int visited = make_visits(plan, &options, document, &visits);
  measure(visits, visited, &rules, (uint32_t)number_of(said, "seed") * 2654435761u + 1, &options, dirname(folder), document);
  cJSON_AddItemToObject(found, "after", conditions());
  char finished[40];
  time_text(finished);
  cJSON_AddStringToObject(cJSON_GetObjectItemCaseSensitive(document, "run"), "finished", finished);
  if (!write_json(document, options.out, &fault)) quit(1, "%s", fault.text);
  free(visits);
  cJSON_Delete(document);
  cJSON_Delete(plan);
  return 0;
}
