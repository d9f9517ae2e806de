#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fmt/format.h>
#include <fstream>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/mapping.h"
#include "tensorbus/cli/doctor.h"

namespace tensorbus::cli {

namespace {

using Level = Finding::Level;

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

Finding CheckKernel() {
  utsname name = {};
  ::uname(&name);
  int major = 0;
  int minor = 0;
  std::sscanf(name.release, "%d.%d", &major, &minor);
  const bool fine = major > 5 || (major == 5 && minor >= 14);
  return {"kernel", fine ? Level::kFine : Level::kWarning, name.release,
          fine ? "" : "Linux 5.14 or newer is what Tensorbus is made for"};
}

Finding CheckMemfd() {
  const Result<UniqueFd> fd = CreateMemfd("tensorbus-doctor", 1 << 16);
  if (!fd.ok()) {
    return {"memfd", Level::kFault, fd.status().message(),
            "shared memory objects are needed; is a seccomp profile in the way?"};
  }
  return {"memfd", Level::kFine, "sealed shared memory works", ""};
}

Finding CheckShm() {
  struct statvfs info = {};
  if (::statvfs("/dev/shm", &info) != 0) {
    return {"dev_shm", Level::kWarning, "there is no /dev/shm",
            "mount a tmpfs there; PyTorch and gloo need it, Tensorbus uses memfd"};
  }
  const double free_gib =
      static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize) / (1U << 30);
  const bool small = free_gib < 0.0625;
  return {"dev_shm", small ? Level::kWarning : Level::kFine,
          fmt::format("{:.2f} GiB free", free_gib),
          small ? "give the container more (docker run --shm-size=8g)" : ""};
}

/// Reads a word of a child of ours, as the agent reads a worker's private memory.
Finding CheckVmRead() {
  static volatile std::uint64_t word = 0x74656e736f726275;
  const std::string yama = FirstLine("/proc/sys/kernel/yama/ptrace_scope");
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return {"process_vm_readv", Level::kWarning, "fork failed", ""};
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    for (;;) ::pause();
  }
  std::uint64_t copy = 0;
  iovec local = {.iov_base = &copy, .iov_len = sizeof copy};
  iovec remote = {.iov_base = const_cast<std::uint64_t*>(&word), .iov_len = sizeof copy};
  const ssize_t got = ::process_vm_readv(child, &local, 1, &remote, 1, 0);
  const int error = errno;
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const bool scoped = !yama.empty() && yama != "0";
  const std::string scope = yama.empty() ? "no yama" : "yama ptrace_scope " + yama;
  if (got != static_cast<ssize_t>(sizeof copy)) {
    return {"process_vm_readv", Level::kWarning,
            fmt::format("refused ({}); {}", std::strerror(error), scope),  // NOLINT
            "private memory goes through buckets, a little slower; allow ptrace between processes "
            "of one user (docker run --cap-add=SYS_PTRACE) to read it in place"};
  }
  if (scoped) {
    return {"process_vm_readv", Level::kWarning, "works for children only; " + scope,
            "sysctl kernel.yama.ptrace_scope=0, or keep tensors in mapped memory"};
  }
  return {"process_vm_readv", Level::kFine, "works; " + scope, ""};
}

Finding CheckIoUring() {
  io_uring_params parameters = {};
  const long fd = ::syscall(SYS_io_uring_setup, 2, &parameters);
  if (fd < 0) {
    return {"io_uring", Level::kFine,
            fmt::format("not available ({}); not needed", std::strerror(errno)),  // NOLINT
            ""};
  }
  ::close(static_cast<int>(fd));
  return {"io_uring", Level::kFine, "available", ""};
}

Finding CheckFiles() {
  rlimit limit = {};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const bool low = limit.rlim_cur < 1024;
  return {"open_files", low ? Level::kWarning : Level::kFine, fmt::format("{}", limit.rlim_cur),
          low ? "raise it: ulimit -n 4096" : ""};
}

Finding CheckLocked() {
  rlimit limit = {};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
  return {
      "locked_memory", Level::kFine,
      unlimited ? "unlimited" : fmt::format("{} KiB (matters for RDMA only)", limit.rlim_cur >> 10),
      ""};
}

Finding CheckHugePages() {
  const std::string shmem = FirstLine("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  const std::string heap = FirstLine("/sys/kernel/mm/transparent_hugepage/enabled");
  const auto chosen = [](const std::string& text) {
    const auto open = text.find('[');
    const auto close = text.find(']');
    return open == std::string::npos || close == std::string::npos
               ? std::string("unknown")
               : text.substr(open + 1, close - open - 1);
  };
  const std::string value = fmt::format("memory {}, shared memory {}", chosen(heap), chosen(shmem));
  const bool off = chosen(shmem) == "never";
  return {
      "huge_pages", Level::kFine, value,
      off ? "optional: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled speeds up "
            "the first touch of large models"
          : ""};
}

Finding CheckClock() {
  const std::string source =
      FirstLine("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  const bool slow = source == "hpet" || source == "acpi_pm" || source == "jiffies";
  return {
      "clock", slow ? Level::kWarning : Level::kFine, source.empty() ? "unknown" : source,
      slow ? "a slow clock source costs a system call per timestamp; use tsc if it is stable" : ""};
}

Finding CheckCpu() {
  std::string features;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) features = "AVX-512";
  if (features.empty() && __builtin_cpu_supports("avx2")) features = "AVX2";
#endif
  return {
      "cpu", features.empty() ? Level::kWarning : Level::kFine,
      fmt::format("{} cores, {}", std::thread::hardware_concurrency(),
                  features.empty() ? "no AVX2" : features),
      features.empty() ? "copies and digests run on the plain kernels, several times slower" : ""};
}

/// Best of a few runs of one thing over `bytes`, in GB/s.
template <typename Run>
double Speed(std::size_t bytes, Run run) {
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    const double seconds = Seconds(std::chrono::steady_clock::now() - begin);
    best = std::max(best, static_cast<double>(bytes) / seconds / 1e9);
  }
  return best;
}

}  // namespace

std::vector<Finding> CheckMachine() {
  return {CheckKernel(),  CheckCpu(),   CheckMemfd(),  CheckShm(),       CheckVmRead(),
          CheckIoUring(), CheckFiles(), CheckLocked(), CheckHugePages(), CheckClock()};
}

std::vector<Finding> Measure() {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  std::vector<Finding> out;
  const auto start = std::chrono::steady_clock::now();
  const Result<UniqueFd> fd = CreateMemfd("tensorbus-doctor", 2 * kBytes);
  const auto mapping = fd.ok() ? Mapping::Create(fd->get(), 2 * kBytes, Mapping::Access::kReadWrite)
                               : Result<Mapping>(fd.status());
  if (!mapping.ok()) {
    return {{"memcpy", Level::kWarning, mapping.status().message(), "free some memory"}};
  }
  const Status touched = TouchPages(mapping->span());
  const double touch_seconds = Seconds(std::chrono::steady_clock::now() - start);
  if (!touched.ok()) return {{"memcpy", Level::kWarning, touched.message(), "free some memory"}};
  const double speed =
      Speed(kBytes, [&] { std::memcpy(mapping->data(), mapping->data() + kBytes, kBytes); });
  out.push_back({"first_touch", Level::kFine,
                 fmt::format("{:.2f} GB/s", 2.0 * kBytes / touch_seconds / 1e9), ""});
  out.push_back({"memcpy", Level::kFine, fmt::format("{:.2f} GB/s, one thread", speed), ""});
  return out;
}

}  // namespace tensorbus::cli
