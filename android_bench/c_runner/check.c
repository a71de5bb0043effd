/* Parity: whether outputs are what eager gives. The four checks are described in plan.schema.json. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double MARK = 1e30; /* beyond: no value, a mark for what stays first */

typedef struct {
  const Tensor *inputs, *kept; /* kept: [B, K, kept] slots that the graph chose, or NULL */
  int ins;
  size_t n; /* slots held */
  const char *folder;
} Given;

static bool wrong(Parity *parity, const char *name, const char *what) {
  parity->passed = false;
  if (!parity->why.text[0]) fail(&parity->why, "%s %s", name, what);
  return true; /* the check was made */
}

/* Keep the difference that takes most of what was allowed. */
static void compare(Parity *parity, const Tensor *output, double error, double allowed) {
  bool worse = isnan(error) || (!isnan(parity->error) && error * parity->allowed >= parity->error * allowed);
  if (worse) parity->error = error, parity->allowed = allowed;
  if (!(error <= allowed)) wrong(parity, output->name, isnan(error) ? "is not finite" : "differs by more than is allowed");
}

static bool check_values(const Tensor *output, const cJSON *check, const Given *given, Parity *parity, Fault *fault) {
  float *expected = read_file(given->folder, text_of(check, "file"), output->count * sizeof(float), fault);
  if (!expected) return false;
  double largest = 0;
  size_t marks = 0, marks_expected = 0;
  for (size_t i = 0; i < output->count; i++) {
    double got = number_at(output, i), want = expected[i];
    bool mark = fabs(got) > MARK && !isinf(got), mark_expected = fabs(want) > MARK;
    marks += mark, marks_expected += mark_expected;
    if (mark || mark_expected) continue;
    double error = fabs(got - want);
    if (!(error <= largest)) largest = isfinite(error) ? error : NAN;
    if (isnan(largest)) break;
  }
  free(expected);
  compare(parity, output, largest, number_of(check, "allowed"));
  if (!isnan(largest) && marks != marks_expected) wrong(parity, output->name, "marks other slots");
  return true;
}

static bool check_slots(const Tensor *output, const cJSON *check, const Given *given, Parity *parity, Fault *fault) {
  size_t kept = (size_t)output->dims[output->rank - 1], heads = output->count / kept, n = given->n;
  uint8_t *may = read_file(given->folder, text_of(check, "file"), heads * n, fault);
  if (!may) return false;
  for (size_t head = 0; head < heads; head++) {
    uint8_t *row = may + head * n;
    for (size_t r = 0; r < kept; r++) {
      double slot = number_at(output, head * kept + r);
      if (!(slot >= 0 && slot < (double)n)) wrong(parity, output->name, "names a slot that is not there");
      else if (row[(size_t)slot] > 2) wrong(parity, output->name, "names a slot twice");
      else if (!row[(size_t)slot]) wrong(parity, output->name, "keeps a slot that must go");
      else row[(size_t)slot] = 3;
    }
    if (memchr(row, 2, n)) wrong(parity, output->name, "lacks a slot that must stay");
  }
  free(may);
  return true;
}

/* The slot that row `r` of `head` came from; n where there is no such slot. */
static size_t slot_at(const Given *given, size_t head, size_t r) {
  size_t kept = (size_t)given->kept->dims[given->kept->rank - 1];
  double slot = number_at(given->kept, head * kept + r);
  return slot >= 0 && slot < (double)given->n ? (size_t)slot : given->n;
}

static bool check_rows(const Tensor *output, const cJSON *check, const Given *given, Parity *parity, Fault *fault) {
  const Tensor *from = NULL;
  const char *name = text_of(check, "of");
  for (int i = 0; i < given->ins; i++)
    if (!strcmp(given->inputs[i].name, name)) from = &given->inputs[i];
  if (!from || from->rank < 3 || output->rank != from->rank || from->type != output->type || (size_t)from->dims[2] != given->n)
    return fail(fault, "%s cannot be rows of %s", output->name, name);
  size_t heads = (size_t)(from->dims[0] * from->dims[1]), n = given->n, kept = (size_t)output->dims[2];
  size_t row = from->bytes / heads / n;
  for (size_t head = 0; head < heads; head++)
    for (size_t r = 0; r < kept; r++) {
      size_t slot = slot_at(given, head, r);
      const char *got = (const char *)output->data + (head * kept + r) * row;
      if (slot == n || memcmp(got, (const char *)from->data + (head * n + slot) * row, row))
        return wrong(parity, output->name, "holds another slot's row");
    }
  return true;
}

static bool check_by_slot(const Tensor *output, const cJSON *check, const Given *given, Parity *parity, Fault *fault) {
  size_t kept = (size_t)output->dims[output->rank - 1], heads = output->count / kept, n = given->n;
  float *expected = read_file(given->folder, text_of(check, "file"), heads * n * sizeof(float), fault);
  if (!expected) return false;
  double largest = 0;
  for (size_t i = 0; i < output->count; i++) {
    size_t head = i / kept, slot = slot_at(given, head, i % kept);
    double error = slot == n ? NAN : fabs(number_at(output, i) - expected[head * n + slot]);
    if (!(error <= largest)) largest = isfinite(error) ? error : NAN;
    if (isnan(largest)) break;
  }
  free(expected);
  compare(parity, output, largest, number_of(check, "allowed"));
  return true;
}

bool check_outputs(const cJSON *cell, const Tensor *inputs, int ins, const Tensor *outputs, int outs,
                   const char *folder, Parity *parity, Fault *fault) {
  static const struct {
    const char *kind;
    bool (*run)(const Tensor *, const cJSON *, const Given *, Parity *, Fault *);
  } checks[] = {{"values", check_values}, {"slots", check_slots}, {"rows", check_rows}, {"by_slot", check_by_slot}};
  *parity = (Parity){.passed = true};
  Given given = {inputs, NULL, ins, (size_t)number_of(cell, "n"), folder};
  for (int i = 0; i < outs; i++)
    if (!strcmp(outputs[i].name, "kept_slot")) given.kept = &outputs[i];
  for (int i = 0; i < outs; i++) {
    const cJSON *output = cJSON_GetArrayItem(list_of(cell, "outputs"), i);
    const cJSON *check = cJSON_GetObjectItemCaseSensitive(output, "check");
    const char *kind = text_of(check, "kind");
    size_t k = 0;
    while (k < 4 && strcmp(checks[k].kind, kind)) k++;
    if (k == 4) return fail(fault, "the plan checks %s by %s, which this runner does not know", outputs[i].name, kind);
    if (k > 1 && !given.kept) return fail(fault, "%s is checked by slots, and there is no kept_slot", outputs[i].name);
    if (!checks[k].run(&outputs[i], check, &given, parity, fault)) return false;
  }
  return true;
}
