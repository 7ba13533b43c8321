# Install rules: headers, library and a package that find_package(stepgraph CONFIG) finds.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(stepgraph_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/stepgraph)

install(TARGETS stepgraph EXPORT stepgraph_targets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY layouts DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/stepgraph FILES_MATCHING PATTERN "*.h")
install(FILES kernels/error.h kernels/export.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/stepgraph/kernels)
install(FILES pipeline/buffers.h pipeline/geometry.h pipeline/graph.h pipeline/pipeline.h pipeline/stepgraph.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/stepgraph/pipeline)
install(EXPORT stepgraph_targets NAMESPACE stepgraph:: FILE stepgraphTargets.cmake DESTINATION ${stepgraph_package_dir})

configure_package_config_file(cmake/stepgraphConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/stepgraphConfig.cmake
    INSTALL_DESTINATION ${stepgraph_package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/stepgraphConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
    ${CMAKE_CURRENT_BINARY_DIR}/stepgraphConfig.cmake
    ${CMAKE_CURRENT_BINARY_DIR}/stepgraphConfigVersion.cmake
    DESTINATION ${stepgraph_package_dir})
