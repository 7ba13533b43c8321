# What every target of this project is compiled with. All of it is private: nothing reaches an engine that links the library.
function(stepgraph_target target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  # By flag: CMake 3.25 does not know the feature cuda_std_20.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
  set_target_properties(${target} PROPERTIES
      CXX_EXTENSIONS OFF
      CUDA_EXTENSIONS OFF
      CXX_VISIBILITY_PRESET hidden
      CUDA_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON
      POSITION_INDEPENDENT_CODE ON
      CUDA_ARCHITECTURES "${STEPGRAPH_CUDA_ARCHITECTURES}")
  # Without contraction the host stages round like the device ones, operation by operation.
  target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion -ffp-contract=off>
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
  if(STEPGRAPH_WERROR)
    target_compile_options(${target} PRIVATE
        $<$<COMPILE_LANGUAGE:CXX>:-Werror>
        $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Werror --Werror=all-warnings>)
  endif()
endfunction()
