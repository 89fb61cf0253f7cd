use cubecl::ir::ElemType;

/// Why an operation was refused. Arguments are checked before anything is launched, so a refused
/// operation has written nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// An argument has a shape that does not fit the others, or its rank is wrong.
    #[error("{argument}: shape {shape:?} given, {allowed} allowed")]
    Shape {
        /// The argument's name in the signature.
        argument: &'static str,
        /// The shape it has.
        shape: Vec<usize>,
        /// The shapes it may have, in the letters of the operation's documentation.
        allowed: String,
    },
    /// An argument's element type is not supported, or differs from what the others ask for.
    #[error("{argument}: element type {dtype} given, {allowed} allowed")]
    Dtype {
        /// The argument's name in the signature.
        argument: &'static str,
        /// The element type it has.
        dtype: ElemType,
        /// The element types it may have.
        allowed: String,
    },
    /// A plain argument is outside its range.
    #[error("{argument}: {value} given, {allowed} allowed")]
    Value {
        /// The argument's name in the signature.
        argument: &'static str,
        /// The value it has.
        value: String,
        /// The values it may have.
        allowed: String,
    },
    /// The device lacks something that the operation cannot do without.
    #[error("{device} has no {feature}")]
    Unsupported {
        /// What is missing.
        feature: String,
        /// The runtime that was asked.
        device: &'static str,
    },
    /// A buffer could not be read back: the runtime's own message.
    #[error("reading {argument} back from the device failed: {message}")]
    Read {
        /// What was read.
        argument: &'static str,
        /// The runtime's message.
        message: String,
    },
}
