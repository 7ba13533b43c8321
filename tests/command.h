// The stepgraph command as a shell runs it.
#pragma once

#include <array>
#include <cstdio>
#include <string>

#include <sys/wait.h>

namespace stepgraph::test {

struct Ended {
    int exit_code;
    std::string printed;  // standard output and error
};

inline Ended command(const std::string& arguments) {
    FILE* pipe = popen((std::string(STEPGRAPH_COMMAND) + " " + arguments + " 2>&1").c_str(), "r");
    std::string printed;
    std::array<char, 4096> part{};
    while (const size_t n = fread(part.data(), 1, part.size(), pipe)) {
        printed.append(part.data(), n);
    }
    return {WEXITSTATUS(pclose(pipe)), printed};
}

}  // namespace stepgraph::test
