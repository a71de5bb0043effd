/* ONNX Runtime by its C API, opened with dlopen: no library is needed to build, and the device's own serves. */
#include "bench.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <onnxruntime_c_api.h>

/* Every function used here is in this version of the API, so that older libraries serve too (1.17 of 2024). */
enum { API = 17 };

static const OrtApiBase *base;
static const OrtApi *ort;
static OrtEnv *environment;
static void *opened;          /* the library */
static const char *provider;  /* of all sessions, such as cpu */

struct Session {
  OrtSession *session;
  bool alone; /* no part of the graph may run on the CPU in the provider's place */
  OrtIoBinding *binding;
  OrtValue **values; /* of what is bound */
  int bound;
};

static bool done(OrtStatus *status, Fault *fault) {
  if (!status) return true;
  const char *message = ort->GetErrorMessage(status);
  fail(fault, "ONNX Runtime: %.*s", (int)strcspn(message, "\n"), message);
  ort->ReleaseStatus(status);
  return false;
}

bool open_runtime(const char *library, Fault *fault) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 1); /* read when the library is opened: later is too late */
  opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!opened) return fail(fault, "ONNX Runtime cannot be opened: %s", dlerror());
  const OrtApiBase *(*get)(void);
  *(void **)&get = dlsym(opened, "OrtGetApiBase");
  if (!get) return fail(fault, "%s is no ONNX Runtime", library);
  base = get();
  ort = base->GetApi(API);
  if (!ort) return fail(fault, "ONNX Runtime %s is too old, needed is 1.%d", base->GetVersionString(), API);
  return done(ort->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "kvcap-bench", &environment), fault);
}

const char *runtime_version(void) { return base->GetVersionString(); }

/* CPUExecutionProvider is cpu, and so on. */
static void short_name(const char *full, char name[64]) {
  snprintf(name, 64, "%s", full);
  char *end = strstr(name, "ExecutionProvider");
  if (end) *end = 0;
  for (char *at = name; *at; at++) *at = (char)tolower((unsigned char)*at);
}

bool choose_provider(const char *asked, Fault *fault) {
  char **names, has[MAX_TEXT / 2] = "", name[64];
  int count;
  if (!done(ort->GetAvailableProviders(&names, &count), fault)) return false;
  for (int i = 0; i < count; i++) {
    short_name(names[i], name);
    if (!strcmp(name, asked)) provider = asked;
    snprintf(has + strlen(has), sizeof has - strlen(has), "%s%s", i ? ", " : "", name);
  }
  done(ort->ReleaseAvailableProviders(names, count), fault);
  return provider || fail(fault, "this ONNX Runtime has no provider %.50s; it has %s", asked, has);
}

/* NNAPI has a function of its own; the others are asked for by their names in capitals. */
static bool append_provider(OrtSessionOptions *options, int threads, Fault *fault) {
  if (!strcmp(provider, "cpu")) return true;
  if (!strcmp(provider, "nnapi")) {
    OrtStatus *(*append)(OrtSessionOptions *, uint32_t);
    *(void **)&append = dlsym(opened, "OrtSessionOptionsAppendExecutionProvider_Nnapi");
    return append ? done(append(options, 0), fault) : fail(fault, "this ONNX Runtime cannot append NNAPI");
  }
  char name[64] = "", count[16];
  for (size_t i = 0; provider[i] && i < sizeof name - 1; i++) name[i] = (char)toupper((unsigned char)provider[i]);
  snprintf(count, sizeof count, "%d", threads);
  bool xnnpack = !strcmp(provider, "xnnpack"), qnn = !strcmp(provider, "qnn");
  const char *key = xnnpack ? "intra_op_num_threads" : "backend_path", *value = xnnpack ? count : "libQnnHtp.so";
  if (xnnpack && !done(ort->AddSessionConfigEntry(options, "session.intra_op.allow_spinning", "0"), fault)) return false;
  return done(ort->SessionOptionsAppendExecutionProvider(options, name, &key, &value, xnnpack || qnn), fault);
}

static Session *create(const char *path, int threads, bool alone, const char *trace, Fault *fault) {
  Session *made = calloc(1, sizeof *made);
  OrtSessionOptions *options = NULL;
  bool ready = made && done(ort->CreateSessionOptions(&options), fault) &&
               done(ort->SetIntraOpNumThreads(options, threads), fault) &&
               done(ort->SetInterOpNumThreads(options, 1), fault) && append_provider(options, threads, fault) &&
               (!alone || done(ort->AddSessionConfigEntry(options, "session.disable_cpu_ep_fallback", "1"), fault)) &&
               (!trace || done(ort->EnableProfiling(options, trace), fault)) &&
               done(ort->CreateSession(environment, path, options, &made->session), fault) &&
               done(ort->CreateIoBinding(made->session, &made->binding), fault);
  if (options) ort->ReleaseSessionOptions(options);
  if (ready) made->alone = alone;
  if (ready) return made;
  if (made) close_session(made);
  return NULL;
}

/* The CPU may help only where the provider alone cannot, and what the session got says so. */
Session *open_session(const char *path, int threads, Fault *fault) {
  Fault unable;
  bool other = strcmp(provider, "cpu");
  Session *made = other ? create(path, threads, true, NULL, &unable) : NULL;
  return made ? made : create(path, threads, false, NULL, fault);
}

Session *open_traced(const char *path, int threads, const char *prefix, Fault *fault) {
  return create(path, threads, false, prefix, fault);
}

void provider_got(const Session *session, char got[80]) {
  bool helped = strcmp(provider, "cpu") && !session->alone;
  snprintf(got, 80, "%s%s", provider, helped ? "+cpu" : "");
}

/* Each run's nodes come before its model_run in the trace; those of the first `warm` runs are left out. */
static bool add_event(cJSON *operators, const cJSON *event, int runs, Fault *fault) {
  const cJSON *found, *entry = NULL, *arguments = cJSON_GetObjectItemCaseSensitive(event, "args");
  const cJSON *operator = cJSON_GetObjectItemCaseSensitive(arguments, "op_name");
  const cJSON *on = cJSON_GetObjectItemCaseSensitive(arguments, "provider"), *took = cJSON_GetObjectItemCaseSensitive(event, "dur");
  char name[64];
  if (!cJSON_IsString(operator) || !cJSON_IsString(on) || !cJSON_IsNumber(took))
    return fail(fault, "ONNX Runtime's trace has an event without operator, provider or duration");
  short_name(on->valuestring, name);
  cJSON_ArrayForEach(found, operators)
    if (!strcmp(text_of(found, "operator"), operator->valuestring) && !strcmp(text_of(found, "provider"), name)) entry = found;
  if (!entry) {
    cJSON *made = cJSON_CreateObject();
    cJSON_AddStringToObject(made, "operator", operator->valuestring);
    cJSON_AddStringToObject(made, "provider", name);
    cJSON_AddNumberToObject(made, "count", 0);
    cJSON_AddNumberToObject(made, "us", 0);
    cJSON_AddItemToArray(operators, made);
    entry = made;
  }
  cJSON *count = cJSON_GetObjectItemCaseSensitive(entry, "count"), *us = cJSON_GetObjectItemCaseSensitive(entry, "us");
  cJSON_SetNumberValue(count, count->valuedouble + 1.0 / runs);
  cJSON_SetNumberValue(us, us->valuedouble + took->valuedouble / runs);
  return true;
}

bool end_trace(Session *session, int warm, int runs, cJSON *operators, Fault *fault) {
  OrtAllocator *allocator;
  char *path = NULL;
  if (!done(ort->GetAllocatorWithDefaultOptions(&allocator), fault) ||
      !done(ort->SessionEndProfiling(session->session, allocator, &path), fault)) return false;
  cJSON *event, *trace = parsed(path);
  bool read = trace || fail(fault, "ONNX Runtime's trace %s cannot be read", path);
  int ended = 0;
  cJSON_ArrayForEach(event, trace) {
    const char *kind = text_of(event, "cat"), *name = text_of(event, "name");
    const char *end = strstr(name, "_kernel_time");
    if (!strcmp(name, "model_run")) ended++;
    else if (read && !strcmp(kind, "Node") && end && ended >= warm) read = add_event(operators, event, runs, fault);
  }
  if (read && ended != warm + runs) read = fail(fault, "ONNX Runtime traced %d runs of %d", ended, warm + runs);
  cJSON_Delete(trace);
  unlink(path);
  allocator->Free(allocator, path);
  return read;
}

static void unbind(Session *session) {
  for (int i = 0; i < session->bound; i++) ort->ReleaseValue(session->values[i]);
  free(session->values);
  session->values = NULL, session->bound = 0;
}

/* Inputs and outputs are the caller's own memory, so that a run allocates neither. What was bound before is forgotten. */
bool bind_tensors(Session *session, Tensor *inputs, int ins, Tensor *outputs, int outs, Fault *fault) {
  static const ONNXTensorElementDataType types[] = {
      [FLOAT32] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, [FLOAT16] = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
      [INT32] = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, [BOOL] = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
      [INT64] = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64};
  OrtMemoryInfo *memory = NULL;
  ort->ClearBoundInputs(session->binding);
  ort->ClearBoundOutputs(session->binding);
  unbind(session);
  session->values = calloc((size_t)(ins + outs), sizeof *session->values);
  if (!session->values) return fail(fault, "there is no memory to bind tensors");
  bool bound = done(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory), fault);
  for (int i = 0; bound && i < ins + outs; i++) {
    Tensor *tensor = i < ins ? &inputs[i] : &outputs[i - ins];
    OrtValue **value = &session->values[session->bound];
    bound = done(ort->CreateTensorWithDataAsOrtValue(memory, tensor->data, tensor->bytes, tensor->dims,
                                                     (size_t)tensor->rank, types[tensor->type], value), fault);
    if (!bound) break;
    session->bound++;
    bound = done(i < ins ? ort->BindInput(session->binding, tensor->name, *value)
                         : ort->BindOutput(session->binding, tensor->name, *value), fault);
  }
  if (memory) ort->ReleaseMemoryInfo(memory);
  return bound;
}

bool run_session(Session *session, Fault *fault) {
  return done(ort->RunWithBinding(session->session, NULL, session->binding), fault);
}

void close_session(Session *session) {
  if (session->binding) ort->ReleaseIoBinding(session->binding);
  unbind(session);
  if (session->session) ort->ReleaseSession(session->session);
  free(session);
}
