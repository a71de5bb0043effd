/* The statistics of a row's samples, and rows as CSV: the twin of runner/statistics.py. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int PERCENTILES[] = {50, 90, 95, 99};
enum { SHARES = sizeof PERCENTILES / sizeof *PERCENTILES };

static int by_size(const void *one, const void *other) {
  double a = *(const double *)one, b = *(const double *)other;
  return (a > b) - (a < b);
}

/* Linear between the two nearest samples. */
static double percentile(const double *sorted, size_t count, int share) {
  double at = share / 100.0 * (double)(count - 1);
  size_t low = (size_t)at, high = low + 1 < count ? low + 1 : low;
  return sorted[low] + (sorted[high] - sorted[low]) * (at - (double)low);
}

void add_statistics(cJSON *row) {
  const cJSON *part, *sample, *rounds = cJSON_GetObjectItemCaseSensitive(row, "samples_us");
  size_t count = 0, at = 0;
  cJSON_ArrayForEach(part, rounds) count += (size_t)cJSON_GetArraySize(part);
  if (!count) return;
  double *sorted = calloc(count, sizeof *sorted);
  if (!sorted) quit(1, "there is no memory for statistics");
  cJSON_ArrayForEach(part, rounds)
    cJSON_ArrayForEach(sample, part) sorted[at++] = sample->valuedouble;
  qsort(sorted, count, sizeof *sorted, by_size);
  cJSON_AddNumberToObject(row, "min_us", sorted[0]);
  for (int i = 0; i < SHARES; i++) {
    char name[16];
    snprintf(name, sizeof name, "p%d_us", PERCENTILES[i]);
    cJSON_AddNumberToObject(row, name, percentile(sorted, count, PERCENTILES[i]));
  }
  free(sorted);
}

void print_percentiles(const cJSON *row) {
  fprintf(stderr, "%s (%s, %d):", text_of(row, "id"), text_of(row, "provider_asked"), (int)number_of(row, "threads"));
  for (int i = 0; i < SHARES; i++) {
    char name[16];
    snprintf(name, sizeof name, "p%d_us", PERCENTILES[i]);
    fprintf(stderr, "%s p%d %.1f", i ? "," : "", PERCENTILES[i], number_of(row, name));
  }
  fputs(" µs\n", stderr);
}

/* A text is quoted, a number stands as in JSON, null is empty. */
static void put_field(FILE *into, const cJSON *value) {
  if (cJSON_IsString(value)) {
    fputc('"', into);
    for (const char *at = value->valuestring; *at; at++) fputs(*at == '"' ? "\"\"" : (char[]){*at, 0}, into);
    fputc('"', into);
  } else if (value && !cJSON_IsNull(value)) {
    char *text = cJSON_PrintUnformatted(value);
    fputs(text ? text : "", into);
    free(text);
  }
}

bool write_csv(const cJSON *document, const cJSON *columns, const char *path, Fault *fault) {
  char *text = NULL;
  size_t size;
  FILE *into = open_memstream(&text, &size);
  if (!into) return fail(fault, "there is no memory for %s", path);
  const cJSON *row, *column, *run = cJSON_GetObjectItemCaseSensitive(document, "run");
  cJSON_ArrayForEach(column, columns) {
    if (column->prev->next) fputc(',', into); /* not the first, whose `prev` is the last */
    put_field(into, column);
  }
  fputc('\n', into);
  cJSON_ArrayForEach(row, list_of(document, "cells")) {
    cJSON_ArrayForEach(column, columns) {
      const cJSON *value = cJSON_GetObjectItemCaseSensitive(row, column->valuestring);
      if (column->prev->next) fputc(',', into);
      put_field(into, value ? value : cJSON_GetObjectItemCaseSensitive(run, column->valuestring));
    }
    fputc('\n', into);
  }
  bool written = !fclose(into) && write_text(text, path, fault);
  free(text);
  return written;
}
