/* One visit to a cell or a copy of memory: make it ready, warm up, take samples. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TRACE_WARM = 5, TRACE_RUNS = 20 }; /* runs of a profile; those to warm up are not counted */

typedef struct {
  Tensor inputs[MAX_PORTS], outputs[MAX_PORTS];
  int ins, outs;
  Session *session;
  void *from, *to; /* of a copy */
  size_t bytes;
} Work;

/* To nanoseconds, which is what the clock knows; at least one. */
static double rounded(double us) { return fmax(round(us * 1000), 1) / 1000; }

static bool run_once(Work *work, Fault *fault) {
  if (work->session) return run_session(work->session, fault);
  memcpy(work->to, work->from, work->bytes);
  __asm__ volatile("" : : "r"(work->to) : "memory"); /* nobody reads it, and it is copied all the same */
  return true;
}

/* Runs that one sample is the mean of: more than 1 only where the clock's step is too much of a single run. */
static int runs_per_sample(Visit *visit, const Rules *rules, double run_us) {
  cJSON *figure = cJSON_GetObjectItemCaseSensitive(visit->result, "runs_per_sample");
  double least = rules->timer_us / rules->max_timer_share;
  if (figure->valueint == 0) cJSON_SetNumberValue(figure, run_us < least ? ceil(least / run_us) : 1);
  return figure->valueint;
}

/* Warm up, then append the microseconds of a run to `samples`: a round's share of what the rules ask for. */
static bool sample(Work *work, Visit *visit, const Rules *rules, cJSON *samples, Fault *fault) {
  double start = now_us();
  int warm = 0;
  for (; warm < rules->warmup_runs || now_us() - start < rules->warmup_us; warm++)
    if (!run_once(work, fault)) return false;
  int together = runs_per_sample(visit, rules, (now_us() - start) / warm);
  int least = (rules->min_runs + rules->rounds - 1) / rules->rounds;
  double share = rules->min_us / rules->rounds, begun = now_us();
  for (int runs = 0; runs < least || now_us() - begun < share; runs += together) {
    double before = now_us();
    for (int i = 0; i < together; i++)
      if (!run_once(work, fault)) return false;
    cJSON_AddItemToArray(samples, cJSON_CreateNumber(rounded((now_us() - before) / together)));
  }
  return true;
}

static void forget(Work *work) {
  if (work->session) close_session(work->session);
  for (int i = 0; i < work->ins; i++) free(work->inputs[i].data);
  for (int i = 0; i < work->outs; i++) free(work->outputs[i].data);
  free(work->from);
  free(work->to);
}

static bool make_ports(const cJSON *list, Tensor *ports, int *count, const char *folder, Fault *fault) {
  const cJSON *port;
  cJSON_ArrayForEach(port, list) {
    if (*count == MAX_PORTS) quit(2, "the plan has a cell of more than %d tensors", MAX_PORTS);
    if (!make_tensor(&ports[(*count)++], port, fault)) return false;
    const cJSON *fill = cJSON_GetObjectItemCaseSensitive(port, "fill");
    if (fill && !fill_tensor(&ports[*count - 1], fill, folder, fault)) return false;
  }
  return true;
}

/* Inputs, session and outputs of a cell; `load_ms` is what opening the session took. With a prefix it writes a trace. */
static bool make_work(Work *work, const Visit *visit, const char *folder, const char *prefix, double *load_ms, Fault *fault) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, text_of(visit->cell, "model"));
  if (!make_ports(list_of(visit->cell, "inputs"), work->inputs, &work->ins, folder, fault)) return false;
  if (!make_ports(list_of(visit->cell, "outputs"), work->outputs, &work->outs, folder, fault)) return false;
  double before = now_us();
  work->session = prefix ? open_traced(path, visit->threads, prefix, fault) : open_session(path, visit->threads, fault);
  *load_ms = rounded((now_us() - before) / 1000);
  return work->session && bind_tensors(work->session, work->inputs, work->ins, work->outputs, work->outs, fault);
}

/* Run once and compare with the plan; the outputs held no number before. */
static bool check_once(Work *work, Visit *visit, const char *folder, Fault *fault) {
  Parity parity;
  if (!run_once(work, fault)) return false;
  if (!check_outputs(visit->cell, work->inputs, work->ins, work->outputs, work->outs, folder, &parity, fault)) return false;
  cJSON *found = cJSON_AddObjectToObject(visit->result, "parity");
  cJSON_AddBoolToObject(found, "passed", parity.passed);
  cJSON_AddItemToObject(found, "error", isnan(parity.error) ? cJSON_CreateNull() : cJSON_CreateNumber(parity.error));
  cJSON_AddNumberToObject(found, "allowed", parity.allowed);
  if (parity.why.text[0]) cJSON_AddStringToObject(found, "text", parity.why.text);
  return true;
}

static void give_up(Visit *visit, const Fault *fault) {
  cJSON_ReplaceItemInObjectCaseSensitive(visit->result, "status", cJSON_CreateString("failed"));
  cJSON_AddStringToObject(visit->result, "reason", fault->text);
  const char *const gone[] = {"samples_us", "runs_per_sample", "parity", "load_ms"}; /* a part is no measurement */
  for (size_t i = 0; i < sizeof gone / sizeof *gone; i++) cJSON_DeleteItemFromObjectCaseSensitive(visit->result, gone[i]);
  fprintf(stderr, "%s failed: %s\n", text_of(visit->cell, "id"), fault->text);
}

bool visit_cell(Visit *visit, const Rules *rules, const char *folder, cJSON *samples) {
  Work work = {.bytes = 0};
  Fault fault = {""};
  double load_ms;
  bool ready = make_work(&work, visit, folder, NULL, &load_ms, &fault);
  if (ready && !cJSON_HasObjectItem(visit->result, "parity")) {
    char got[80];
    provider_got(work.session, got);
    cJSON_ReplaceItemInObjectCaseSensitive(visit->result, "provider_got", cJSON_CreateString(got));
    cJSON_AddNumberToObject(visit->result, "load_ms", load_ms);
    ready = check_once(&work, visit, folder, &fault);
  }
  ready = ready && sample(&work, visit, rules, samples, &fault);
  if (!ready) give_up(visit, &fault);
  forget(&work);
  return ready;
}

void profile_cell(Visit *visit, const char *folder, const char *prefix) {
  Work work = {.bytes = 0};
  Fault fault = {""};
  double load_ms;
  cJSON *operators = cJSON_CreateArray();
  bool ready = make_work(&work, visit, folder, prefix, &load_ms, &fault);
  for (int i = 0; ready && i < TRACE_WARM + TRACE_RUNS; i++) ready = run_once(&work, &fault);
  ready = ready && end_trace(work.session, TRACE_WARM, TRACE_RUNS, operators, &fault);
  forget(&work);
  if (!ready) quit(1, "%s has no profile: %s", text_of(visit->cell, "id"), fault.text);
  cJSON_AddItemToObject(visit->result, "operators", operators);
}

bool visit_copy(Visit *visit, const Rules *rules, cJSON *samples) {
  size_t bytes = (size_t)number_of(visit->cell, "bytes");
  Work work = {.from = malloc(bytes), .to = malloc(bytes), .bytes = bytes};
  Fault fault = {""};
  if (!work.from || !work.to) quit(1, "there is no memory for a copy of %zu bytes", bytes);
  memset(work.from, 1, bytes);
  bool copied = sample(&work, visit, rules, samples, &fault);
  forget(&work);
  return copied;
}
