// What the results of a case must be: the expected tensors of its file, the program's own logits, another device's results.
#pragma once

#include <string>
#include <vector>

#include <stepgraph/tools/case_file.h>
#include <stepgraph/tools/run_command.h>
#include <stepgraph/tools/safetensors.h>

namespace stepgraph::test {

/// One sentence for each difference (of a tensor the first few); empty: all is well.
using Differences = std::vector<std::string>;

/// One case of tests/data: its inputs, and the file with the expected tensors.
struct LoadedCase {
    std::string name;
    tools::Safetensors file;
    tools::Case step;
};

/// Names of the case files in tests/data, sorted, without ending.
std::vector<std::string> case_names();
std::string case_path(const std::string& name);
LoadedCase load(const std::string& name);

/// Against `expected.*`, within the tolerances of the case files. `results` hold logits.
Differences differences_from_expected(const LoadedCase& loaded, const tools::StepResults& results);

/// Indices and physical slots against a full sort of the results' own logits: no tolerance.
Differences differences_from_own_logits(const LoadedCase& loaded, const tools::StepResults& results);

/// One device against another: bits, but for the logits, and where projections were made here for what they reach.
Differences differences_between(const LoadedCase& loaded, const tools::StepResults& a, const tools::StepResults& b);

/// The sentences, one a line.
std::string joined(const Differences& differences);

}  // namespace stepgraph::test
