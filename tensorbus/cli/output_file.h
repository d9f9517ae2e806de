#pragma once

#include <string>
#include <string_view>
#include <sys/types.h>

#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"

namespace tensorbus::cli {

/// A file that somebody asked for. It stands under its name once all of it is written: until then,
/// and for ever when something fails, whatever was there before stays. What is no regular file
/// (/dev/stdout) is written as it is.
///
/// Thread-compatible. Errors are as the system says, naming the path.
class OutputFile {
 public:
  static Result<OutputFile> Create(const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  /// Removes what has not been finished.
  ~OutputFile();

  Status Write(std::string_view text);
  /// Gives the file its name. Nothing is written afterwards.
  Status Finish();

 private:
  OutputFile() = default;

  std::string path_;   // as it was asked for
  std::string place_;  // where it will stand; through links, if there are any
  std::string draft_;  // where it stands now, "" if there is nothing to rename
  UniqueFd file_;
};

/// Writes a whole file, as above.
Status WriteFile(std::string_view text, const std::string& path);

}  // namespace tensorbus::cli
