#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "flex")]
mod flex;
