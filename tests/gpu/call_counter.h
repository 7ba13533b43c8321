// Which CUDA functions a piece of code calls, seen by CUPTI.
#pragma once

#include <map>
#include <stdexcept>
#include <string>

#include <cupti.h>

namespace stepgraph::test {

/// Counts calls of the CUDA runtime and of the driver while it lives.
class CallCounter {
public:
    CallCounter() {
        check(cuptiSubscribe(&subscriber_, &CallCounter::called, this), "cuptiSubscribe");
        check(cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_RUNTIME_API), "cuptiEnableDomain");
        check(cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API), "cuptiEnableDomain");
    }
    ~CallCounter() { cuptiUnsubscribe(subscriber_); }
    CallCounter(const CallCounter&) = delete;
    CallCounter& operator=(const CallCounter&) = delete;

    [[nodiscard]] const std::map<std::string, int>& calls() const { return calls_; }

private:
    static void check(CUptiResult result, const char* call) {
        if (result != CUPTI_SUCCESS) {
            throw std::runtime_error(std::string(call) + " failed with " + std::to_string(result));
        }
    }
    static void CUPTIAPI called(void* self, CUpti_CallbackDomain /*domain*/, CUpti_CallbackId /*id*/, const void* raw) {
        const auto* data = static_cast<const CUpti_CallbackData*>(raw);
        if (data->callbackSite == CUPTI_API_ENTER) {
            ++static_cast<CallCounter*>(self)->calls_[data->functionName];
        }
    }

    CUpti_SubscriberHandle subscriber_ = nullptr;
    std::map<std::string, int> calls_;
};

}  // namespace stepgraph::test
