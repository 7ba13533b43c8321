// A file name of this test's own, removed when it ends.
#pragma once

#include <filesystem>
#include <string>

#include <unistd.h>

namespace stepgraph::test {

class TemporaryFile {
public:
    explicit TemporaryFile(const std::string& name)
        : path_(std::filesystem::temp_directory_path() / ("stepgraph-" + std::to_string(getpid()) + "-" + name)) {
        std::filesystem::remove(path_);
    }
    ~TemporaryFile() {
        std::error_code ignored;
        std::filesystem::remove(path_, ignored);
    }
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;

    [[nodiscard]] const std::filesystem::path& path() const { return path_; }

private:
    std::filesystem::path path_;
};

}  // namespace stepgraph::test
