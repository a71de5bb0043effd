/* ONNX Runtime by its C API, opened with dlopen: no library is needed to build, and the device's own serves. */
#include "bench.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <onnxruntime_c_api.h>

/* Every function used here is in this version of the API, so that older libraries serve too (1.17 of 2024). */
enum { API = 17 };

static const OrtApiBase *base;
static const OrtApi *ort;
static OrtEnv *environment;

struct Session {
  OrtSession *session;
  OrtIoBinding *binding;
  OrtValue **values; /* of what is bound */
  int bound;
};

static bool done(OrtStatus *status, Fault *fault) {
  if (!status) return true;
  const char *said = ort->GetErrorMessage(status);
  fail(fault, "ONNX Runtime: %.*s", (int)strcspn(said, "\n"), said);
  ort->ReleaseStatus(status);
  return false;
}

bool open_runtime(const char *library, Fault *fault) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 1); /* read when the library is opened: later is too late */
  void *opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
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

Session *open_session(const char *path, int threads, Fault *fault) {
  Session *made = calloc(1, sizeof *made);
  OrtSessionOptions *options = NULL;
  bool ready = made && done(ort->CreateSessionOptions(&options), fault) &&
               done(ort->SetIntraOpNumThreads(options, threads), fault) &&
               done(ort->SetInterOpNumThreads(options, 1), fault) &&
               done(ort->CreateSession(environment, path, options, &made->session), fault) &&
               done(ort->CreateIoBinding(made->session, &made->binding), fault);
  if (options) ort->ReleaseSessionOptions(options);
  if (ready) return made;
  if (made) close_session(made);
  return NULL;
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
