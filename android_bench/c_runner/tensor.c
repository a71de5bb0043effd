/* Inputs of a cell, made by the plan's rules: the same numbers in every runner. Little-endian machines only. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the plan's files are little-endian");

enum { ALIGNMENT = 64 }; /* what the kernels of ONNX Runtime like */

static uint32_t mix(uint32_t x) { /* lowbias32, https://github.com/skeeto/hash-prospector */
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

uint32_t hash11(uint32_t seed, uint32_t index) { return mix(index + mix(seed)) >> 21; }

/* To the nearest half, ties to even; as compilers' own types for it differ between targets. */
static uint16_t half_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  float size = fabsf(value);
  if (isnan(value)) return sign | 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < 6.103515625e-05f) return sign | (uint16_t)lrintf(size * 16777216.0f); /* below 2^-14 */
  bits &= 0x7fffffff;
  bits += 0xfff + (bits >> 13 & 1); /* round the 13 bits that go */
  return sign | (uint16_t)((bits >> 13) - ((127 - 15) << 10));
}

static float of_half(uint16_t half) {
  int power = half >> 10 & 31, rest = half & 1023;
  float size = power == 0 ? ldexpf((float)rest, -24)
               : power < 31 ? ldexpf((float)(rest + 1024), power - 25)
               : rest ? NAN : INFINITY;
  return half & 0x8000 ? -size : size;
}

static size_t width(Type type) { return type == BOOL ? 1 : type == FLOAT16 ? 2 : type == INT64 ? 8 : 4; }

static void put(Tensor *tensor, size_t index, double value) {
  switch (tensor->type) {
    case FLOAT32: ((float *)tensor->data)[index] = (float)value; break;
    case FLOAT16: ((uint16_t *)tensor->data)[index] = half_of((float)value); break;
    case INT32: ((int32_t *)tensor->data)[index] = (int32_t)value; break;
    case BOOL: ((uint8_t *)tensor->data)[index] = value != 0; break;
    case INT64: ((int64_t *)tensor->data)[index] = (int64_t)value; break;
  }
}

double number_at(const Tensor *tensor, size_t index) {
  switch (tensor->type) {
    case FLOAT32: return ((const float *)tensor->data)[index];
    case FLOAT16: return of_half(((const uint16_t *)tensor->data)[index]);
    case INT32: return ((const int32_t *)tensor->data)[index];
    case BOOL: return ((const uint8_t *)tensor->data)[index];
    case INT64: return (double)((const int64_t *)tensor->data)[index];
  }
  return NAN;
}

void resize(Tensor *tensor) {
  tensor->count = 1;
  for (int i = 0; i < tensor->rank; i++) tensor->count *= (size_t)tensor->dims[i];
  tensor->bytes = tensor->count * width(tensor->type);
}

bool make_tensor(Tensor *tensor, const cJSON *port, Fault *fault) {
  const char *names[] = {"float32", "float16", "int32", "bool"};
  const char *type = text_of(port, "dtype");
  int found = 0;
  while (found < 4 && strcmp(names[found], type)) found++;
  if (found == 4) quit(2, "the plan names the type %s, which this runner does not know", type);
  const cJSON *shape = list_of(port, "shape"), *size;
  *tensor = (Tensor){.name = text_of(port, "name"), .type = (Type)found, .count = 1};
  cJSON_ArrayForEach(size, shape) {
    if (tensor->rank == MAX_RANK) quit(2, "the plan has a tensor of more than %d axes", MAX_RANK);
    tensor->dims[tensor->rank++] = (int64_t)size->valuedouble;
  }
  resize(tensor);
  if (posix_memalign(&tensor->data, ALIGNMENT, tensor->bytes ? tensor->bytes : 1)) {
    tensor->data = NULL;
    return fail(fault, "there is no memory for %zu bytes of %s", tensor->bytes, tensor->name);
  }
  memset(tensor->data, 0xff, tensor->bytes); /* NaN, so that what is not written is seen */
  return true;
}

bool fill_tensor(Tensor *tensor, const cJSON *fill, const char *folder, Fault *fault) {
  const char *kind = text_of(fill, "kind");
  if (!strcmp(kind, "hash")) {
    uint32_t seed = (uint32_t)number_of(fill, "seed");
    double scale = number_of(fill, "scale"), offset = number_of(fill, "offset");
    for (size_t i = 0; i < tensor->count; i++) put(tensor, i, hash11(seed, (uint32_t)i) * scale + offset);
  } else if (!strcmp(kind, "constant")) {
    double value = number_of(fill, "value");
    for (size_t i = 0; i < tensor->count; i++) put(tensor, i, value);
  } else if (!strcmp(kind, "permutation") && tensor->rank) {
    int64_t last = tensor->dims[tensor->rank - 1], first = (int64_t)number_of(fill, "first");
    int64_t by = (int64_t)number_of(fill, "multiplier");
    for (size_t i = 0; i < tensor->count; i++) {
      int64_t j = (int64_t)i % last;
      put(tensor, i, (double)(j < first ? j * by % first : j));
    }
  } else if (!strcmp(kind, "file")) {
    void *data = read_file(folder, text_of(fill, "file"), tensor->bytes, fault);
    if (!data) return false;
    memcpy(tensor->data, data, tensor->bytes);
    free(data);
  } else {
    quit(2, "the plan fills %s by %s, which this runner does not know", tensor->name, kind);
  }
  return true;
}
