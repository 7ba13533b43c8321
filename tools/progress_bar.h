// How far a long command is.
#pragma once

#include <cstdio>
#include <string>

#include <unistd.h>

namespace stepgraph::tools {

/// A bar at the bottom of a terminal; nothing where the output goes elsewhere, or is not `wanted`.
class ProgressBar {
public:
    explicit ProgressBar(int steps, bool wanted = true) : steps_(steps), shown_(wanted && isatty(STDOUT_FILENO) != 0) {}
    ~ProgressBar() { clear(); }
    ProgressBar(const ProgressBar&) = delete;
    ProgressBar& operator=(const ProgressBar&) = delete;

    void clear() const {
        if (shown_) {
            std::printf("\r\033[K");
        }
    }
    void show(int done) const {
        if (shown_) {
            const int width = 40;
            const int filled = done * width / steps_;
            std::printf("\r[%s%s] %d/%d", std::string(static_cast<size_t>(filled), '#').c_str(),
                        std::string(static_cast<size_t>(width - filled), '.').c_str(), done, steps_);
            std::fflush(stdout);
        }
    }

private:
    int steps_;
    bool shown_;
};

}  // namespace stepgraph::tools
