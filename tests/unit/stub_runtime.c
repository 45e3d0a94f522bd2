// A CUDA runtime of one device with a clock that a test sets: events happen `behind` nanoseconds after they are recorded.
#include <stdlib.h>

typedef struct {
  long long at;
} Event;

static long long now, behind;
static int capturing, failing, device, made, recorded, last;

void stub_set(long long clock, long long late, int captures, int fails) {
  now = clock;
  behind = late;
  capturing = captures;
  failing = fails;
}
long long stub_now(void) { return ++now; }  // a look takes a nanosecond
int stub_made(void) { return made; }
int stub_recorded(void) { return recorded; }
int stub_last(void) { return last; }
int stub_device(void) { return device; }

static int said(int code) {
  if (code) last = code;
  return code;
}
int cudaEventCreateWithFlags(void **event, unsigned flags) {
  (void)flags;
  ++made;
  *event = calloc(1, sizeof(Event));
  return 0;
}
int cudaEventRecord(void *event, void *stream) {
  (void)stream;
  if (failing) return said(400);
  ++recorded;
  ((Event *)event)->at = now + behind;
  return 0;
}
int cudaEventQuery(void *event) { return said(now >= ((Event *)event)->at ? 0 : 600); }
int cudaEventElapsedTime(float *ms, void *begin, void *end) {
  *ms = (float)((double)(((Event *)end)->at - ((Event *)begin)->at) / 1e6);
  return 0;
}
int cudaStreamIsCapturing(void *stream, int *status) {
  (void)stream;
  *status = capturing;
  return 0;
}
int cudaGetDevice(int *index) {
  *index = device;
  return 0;
}
int cudaSetDevice(int index) {
  device = index;
  return 0;
}
int cudaGetLastError(void) {
  const int error = last;
  last = 0;
  return error;
}
