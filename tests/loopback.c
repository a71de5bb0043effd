/* Preloaded into adbd by the tests: whatever it listens on is bound to loopback, as no phone is to be had from outside. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/socket.h>

__attribute__((constructor)) static void not_in_children(void) { unsetenv("LD_PRELOAD"); }

int bind(int fd, const struct sockaddr *address, socklen_t size) {
  int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
  if (address->sa_family == AF_INET) {
    struct sockaddr_in local = *(const struct sockaddr_in *)address;
    local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return real(fd, (struct sockaddr *)&local, size);
  }
  if (address->sa_family == AF_INET6) {
    struct sockaddr_in6 local = *(const struct sockaddr_in6 *)address;
    inet_pton(AF_INET6, "::ffff:127.0.0.1", &local.sin6_addr);
    return real(fd, (struct sockaddr *)&local, size);
  }
  if (address->sa_family == AF_VSOCK) return -1; /* reaches the machine's host */
  return real(fd, address, size);
}
