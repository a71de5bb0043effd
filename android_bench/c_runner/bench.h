/* What the files of the C runner share. B batch, K KV heads, n slots held, D head size. */
#ifndef KVCAP_BENCH_H
#define KVCAP_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cJSON.h"

enum { MAX_RANK = 8, MAX_PORTS = 32, MAX_TEXT = 400 };

typedef enum { FLOAT32, FLOAT16, INT32, BOOL, INT64 } Type; /* no cell has the last */

/* An input or output of a cell, with its memory. */
typedef struct {
  const char *name; /* the plan's, which outlives it */
  Type type;
  int rank;
  int64_t dims[MAX_RANK];
  size_t count; /* of numbers */
  size_t bytes;
  void *data;
} Tensor;

/* Why something cannot go on; empty where it can. */
typedef struct {
  char text[MAX_TEXT];
} Fault;

/* json.c: the plan's fields, by name; a missing one or one of another type ends the program with code 2. */
cJSON *parsed(const char *path); /* NULL where it cannot be read or is no JSON */
cJSON *read_json(const char *path);
const char *text_of(const cJSON *object, const char *name);
double number_of(const cJSON *object, const char *name);
const cJSON *list_of(const cJSON *object, const char *name);
bool write_text(const char *text, const char *path, Fault *fault); /* whole or not at all */
bool write_json(const cJSON *value, const char *path, Fault *fault);
void *read_file(const char *folder, const char *name, size_t bytes, Fault *fault);
bool fail(Fault *fault, const char *format, ...) __attribute__((format(printf, 2, 3))); /* false, always */
_Noreturn void quit(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* tensor.c: what cells are fed. */
void resize(Tensor *tensor); /* numbers and bytes, after its type and shape */
bool make_tensor(Tensor *tensor, const cJSON *port, Fault *fault);
bool fill_tensor(Tensor *tensor, const cJSON *fill, const char *folder, Fault *fault);
double number_at(const Tensor *tensor, size_t index);
uint32_t hash11(uint32_t seed, uint32_t index);

/* check.c: what cells give, against what the plan says they must. */
typedef struct {
  bool passed;
  double error;   /* largest difference, as a share of `allowed` the worst; NaN where it is no number */
  double allowed; /* of that output */
  Fault why;
} Parity;
bool check_outputs(const cJSON *cell, const Tensor *inputs, int ins, const Tensor *outputs, int outs,
                   const char *folder, Parity *parity, Fault *fault);

/* ort.c: ONNX Runtime, opened when the program runs. */
typedef struct Session Session;
bool open_runtime(const char *library, Fault *fault);
const char *runtime_version(void);
bool choose_provider(const char *asked, Fault *fault); /* of all sessions; must be called before the first */
Session *open_session(const char *path, int threads, Fault *fault);
Session *open_traced(const char *path, int threads, const char *prefix, Fault *fault); /* writes a trace */
void provider_got(const Session *session, char got[80]); /* such as xnnpack, or xnnpack+cpu where the CPU helps */
bool end_trace(Session *session, int warm, int runs, cJSON *operators, Fault *fault); /* read, summed and removed */
bool bind_tensors(Session *session, Tensor *inputs, int ins, Tensor *outputs, int outs, Fault *fault);
bool run_session(Session *session, Fault *fault);
void close_session(Session *session);

/* facts.c: the clock, the cores, sysfs. Lists are NULL where nothing is known. */
double now_us(void);
double timer_step_us(void);
void time_text(char text[40]); /* UTC, as in ISO 8601 */
bool file_line(const char *path, char *line, int size); /* the first, without its end */
cJSON *per_core(const char *name, bool number);         /* of cpufreq */
cJSON *temperatures(void);
cJSON *peak_memory(void); /* of this process */
void add_if(cJSON *object, const char *name, cJSON *value);
int core_count(void);
int biggest_cores(int *cores, int count); /* highest frequency first; how many were found */
bool hold_to_cores(const int *cores, int count);

/* device.c: what is measured on, and what may slow it down. */
cJSON *device_facts(const char *asked); /* auto, host or emulated */
cJSON *conditions(void);

/* measure.c: cells and copies of memory, by the plan's rules; false where a cell failed, which its result then says. */
typedef struct {
  int warmup_runs, min_runs, rounds;
  double warmup_us, min_us, max_timer_share;
  double timer_us; /* the clock's step */
} Rules;
typedef struct {
  const cJSON *cell; /* of the plan, or a baseline of it */
  bool copy;         /* a copy of memory */
  int threads;
  cJSON *result;     /* of the result document */
} Visit;
bool visit_cell(Visit *visit, const Rules *rules, const char *folder, cJSON *samples);
void profile_cell(Visit *visit, const char *folder, const char *prefix); /* its operators, in runs of their own */
bool visit_copy(Visit *visit, const Rules *rules, cJSON *samples);

/* stats.c: what a row's samples say; rows without samples stay as they are. */
void add_statistics(cJSON *row);
void print_percentiles(const cJSON *row);
bool write_csv(const cJSON *document, const cJSON *columns, const char *path, Fault *fault); /* a line per cell */

/* decoder.c: all rounds of the plan's decoder; what it takes, or why it cannot be, goes into its row of the result. */
void visit_decoder(const cJSON *wanted, int threads, int rounds, const char *folder, cJSON *row);

#endif
