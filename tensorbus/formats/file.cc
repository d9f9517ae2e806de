#include "tensorbus/formats/file.h"

#include <array>
#include <cerrno>
#include <fmt/format.h>
#include <fstream>
#include <memory>
#include <sys/stat.h>
#include <zlib.h>

#include "tensorbus/base/malformed.h"

namespace tensorbus::formats {
namespace {

constexpr std::size_t kChunkBytes = 256 * 1024;

struct InflateEnd {
  void operator()(z_stream* stream) const noexcept { inflateEnd(stream); }
};

}  // namespace

Result<std::string> Gunzip(const std::string& data) {
  constexpr int kGzipWindow = 15 + 16;
  z_stream stream = {};
  if (inflateInit2(&stream, kGzipWindow) != Z_OK)
    return Status(Code::kResourceExhausted, "gzip: no memory", Reason::kOutOfMemory);
  const std::unique_ptr<z_stream, InflateEnd> closer(&stream);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
  stream.avail_in = static_cast<uInt>(data.size());
  std::string text;
  while (true) {
    const std::size_t before = text.size();
    text.resize(before + kChunkBytes);
    stream.next_out = reinterpret_cast<Bytef*>(text.data() + before);
    stream.avail_out = kChunkBytes;
    const int status = inflate(&stream, Z_NO_FLUSH);
    text.resize(text.size() - stream.avail_out);
    if (text.size() > kMaxTextBytes)
      return Malformed(fmt::format("gzip: holds more than {} bytes", kMaxTextBytes));
    if (status == Z_STREAM_END) {
      if (stream.avail_in == 0) return text;
      inflateReset(&stream);  // what follows is one more member
    } else if (status != Z_OK) {
      return Malformed("gzip: damaged or truncated");
    }
  }
}

Result<std::string> ReadText(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return ErrnoStatus(errno, path);
  if (S_ISDIR(info.st_mode)) return ErrnoStatus(EISDIR, path);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return ErrnoStatus(errno != 0 ? errno : EIO, path);
  std::string data;
  std::array<char, 64 * 1024> buffer = {};
  while (file.read(buffer.data(), buffer.size()) || file.gcount() > 0) {
    data.append(buffer.data(), static_cast<std::size_t>(file.gcount()));
    if (data.size() > kMaxTextBytes)
      return Malformed(fmt::format("{}: larger than {} bytes", path, kMaxTextBytes));
  }
  if (file.bad()) return ErrnoStatus(errno != 0 ? errno : EIO, path);
  if (data.size() < 2 || data[0] != '\x1f' || data[1] != '\x8b') return data;
  auto text = Gunzip(data);
  if (!text.ok()) return text.status().Annotate(path);
  return text;
}

}  // namespace tensorbus::formats
