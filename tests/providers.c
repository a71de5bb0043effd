/* An ONNX Runtime that says it has XNNPACK, NNAPI and QNN. What is asked of it is written to $LOG; a session that may
 * not fall back to the CPU is refused, as theirs is when they cannot run a whole graph; any other is the CPU's. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <onnxruntime_c_api.h>

static OrtApi api;
static const OrtApi *real;
static const OrtApiBase *base;
static int alone; /* the options made last must not fall back */

static void note(const char *one, const char *mark, const char *other) {
  FILE *log = fopen(getenv("LOG"), "a");
  if (!log) abort();
  fprintf(log, "%s%s%s\n", one, mark, other);
  fclose(log);
}

static OrtStatusPtr ORT_API_CALL available(char ***names, int *count) {
  static char *own[] = {"XnnpackExecutionProvider", "NnapiExecutionProvider", "QNNExecutionProvider", "CPUExecutionProvider"};
  *names = own, *count = 4;
  return NULL;
}

static OrtStatusPtr ORT_API_CALL release(char **names, int count) {
  (void)names, (void)count;
  return NULL;
}

static OrtStatusPtr ORT_API_CALL append(OrtSessionOptions *options, const char *name, const char *const *keys,
                                        const char *const *values, size_t count) {
  (void)options;
  char text[200];
  snprintf(text, sizeof text, "%s%s%s", name, count ? " " : "", count ? keys[0] : "");
  note(text, count ? "=" : "", count ? values[0] : "");
  return NULL;
}

OrtStatusPtr OrtSessionOptionsAppendExecutionProvider_Nnapi(OrtSessionOptions *options, uint32_t flags) {
  (void)options;
  note("NNAPI", " ", flags ? "1" : "0");
  return NULL;
}

static OrtStatusPtr ORT_API_CALL options(OrtSessionOptions **made) {
  alone = 0;
  return real->CreateSessionOptions(made);
}

static OrtStatusPtr ORT_API_CALL config(OrtSessionOptions *made, const char *key, const char *value) {
  note(key, "=", value);
  if (strcmp(key, "session.disable_cpu_ep_fallback")) return real->AddSessionConfigEntry(made, key, value);
  alone = 1;
  return NULL;
}

static OrtStatusPtr ORT_API_CALL session(const OrtEnv *env, const ORTCHAR_T *path, const OrtSessionOptions *made, OrtSession **out) {
  return alone ? real->CreateStatus(ORT_FAIL, "some nodes would run on the CPU") : real->CreateSession(env, path, made, out);
}

static const OrtApi *ORT_API_CALL get_api(uint32_t version) {
  real = base->GetApi(version);
  api = *real;
  api.GetAvailableProviders = available, api.ReleaseAvailableProviders = release;
  api.SessionOptionsAppendExecutionProvider = append, api.CreateSessionOptions = options;
  api.AddSessionConfigEntry = config, api.CreateSession = session;
  return &api;
}

const OrtApiBase *ORT_API_CALL OrtGetApiBase(void) {
  static OrtApiBase own;
  const OrtApiBase *(*get)(void);
  *(void **)&get = dlsym(dlopen(REAL, RTLD_NOW | RTLD_LOCAL), "OrtGetApiBase");
  base = get();
  own = (OrtApiBase){get_api, base->GetVersionString};
  return &own;
}
