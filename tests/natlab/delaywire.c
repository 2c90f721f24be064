// A wire that takes its time: two TUN devices, one in each of two network namespaces, and a queue each way.
//
//     delaywire NAMESPACE_FD NAME NAMESPACE_FD NAME MICROSECONDS
//
// Says "up" on stdout once both devices exist and ends with its stdin, so that it never outlives who started it; the
// devices go with it. In order, nothing lost but what finds the queue full: then it is not read, and the device's own
// queue drops, as a router's does. For kernels without netem.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MTU = 1500, ROOM = 8192, AT_ONCE = 64 };  // 8,192 packets: 1 Gbit/s for 98 ms

struct packet {
  int64_t due;  // ns
  int nbytes;
  uint8_t bytes[MTU];
};

struct lane {
  int from, to;
  struct packet *ring;
  uint64_t first, next;  // packets written and read so far
};

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int open_tun(int namespace, const char *name) {
  if (setns(namespace, CLONE_NEWNET) != 0) fail("setns");
  int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tun < 0) fail("/dev/net/tun");
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (ioctl(tun, TUNSETIFF, &request) != 0) fail(name);
  return tun;
}

static int is_full(const struct lane *lane) { return lane->next - lane->first == ROOM; }

static void take(struct lane *lane, int64_t delay) {
  for (int n = 0; n < AT_ONCE && !is_full(lane); n++) {
    struct packet *packet = &lane->ring[lane->next % ROOM];
    packet->nbytes = read(lane->from, packet->bytes, MTU);
    if (packet->nbytes <= 0) return;  // nothing waits, or the device is down for a while
    packet->due = now() + delay;
    lane->next++;
  }
}

static void deliver(struct lane *lane) {
  while (lane->first < lane->next) {
    struct packet *packet = &lane->ring[lane->first % ROOM];
    if (packet->due > now()) return;
    // A device that is down takes nothing: what was on the wire is lost then, as on a real one.
    if (write(lane->to, packet->bytes, packet->nbytes) < 0 && errno == EAGAIN) return;
    lane->first++;
  }
}

static int64_t patience(const struct lane lanes[2]) {
  int64_t due = INT64_MAX;
  for (int n = 0; n < 2; n++)
    if (lanes[n].first < lanes[n].next && lanes[n].ring[lanes[n].first % ROOM].due < due)
      due = lanes[n].ring[lanes[n].first % ROOM].due;
  if (due == INT64_MAX) return 1000000000;
  int64_t wait = due - now();
  return wait > 0 ? wait : 0;
}

static int wait_for_work(const struct lane lanes[2]) {
  struct pollfd polled[3] = {{.fd = STDIN_FILENO, .events = POLLIN}};
  for (int n = 0; n < 2; n++)
    polled[n + 1] = (struct pollfd){.fd = is_full(&lanes[n]) ? -1 : lanes[n].from, .events = POLLIN};
  int64_t wait = patience(lanes);
  struct timespec limit = {.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000};
  if (ppoll(polled, 3, &limit, NULL) < 0 && errno != EINTR) fail("ppoll");
  return polled[0].revents == 0;
}

int main(int count, char **words) {
  if (count != 6) {
    fprintf(stderr, "usage: %s NAMESPACE_FD NAME NAMESPACE_FD NAME MICROSECONDS\n", words[0]);
    return 2;
  }
  int left = open_tun(atoi(words[1]), words[2]), right = open_tun(atoi(words[3]), words[4]);
  int64_t delay = atoll(words[5]) * 1000;
  struct lane lanes[2] = {{.from = left, .to = right}, {.from = right, .to = left}};
  for (int n = 0; n < 2; n++)
    if ((lanes[n].ring = malloc(ROOM * sizeof(struct packet))) == NULL) fail("malloc");
  puts("up");
  fflush(stdout);
  while (wait_for_work(lanes))
    for (int n = 0; n < 2; n++) {
      deliver(&lanes[n]);
      take(&lanes[n], delay);
    }
  return 0;
}
